"""Tells which hooks a module has: functions that run before or after its forward or backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

# Registries of a module, and those of torch whose hooks run for every module.
_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks that run when a module is called, and not when its forward is."""
    for name in _FORWARD:
        yield from getattr(module, name).values()


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks of a module change or read gradients."""
    return any(getattr(module, name) for name in _BACKWARD)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its forward does."""
    return any(forward_hooks(module)) or has_backward_hooks(module)


def global_hooks() -> list[Callable[..., Any]]:
    """Return the hooks that torch runs for every module of the process."""
    names = (f"_global{name}" for name in (*_FORWARD, *_BACKWARD))
    return [hook for name in names for hook in getattr(torch_module, name).values()]
