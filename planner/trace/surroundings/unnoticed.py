"""Keeps a model from noticing that it is traced, so that it does what it does in training.

Libraries ask torch whether a graph is being made, and if so do what holds for any input: masks of
their own where training has `is_causal`, a check left out. Planned would be what nobody runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from torch import _subclasses
from torch._subclasses import fake_tensor

_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def unnoticed() -> Iterator[None]:
    """Tell all but torch itself that nothing is compiled or exported, and that tensors are real."""
    with ExitStack() as patches:
        for name in ("is_compiling", "is_exporting"):
            hidden = _hidden(getattr(torch.compiler, name))
            patches.enter_context(patch.object(torch.compiler, name, hidden))
        patches.callback(setattr, _subclasses, "__class__", _subclasses.__class__)
        _subclasses.__class__ = _Subclasses
        yield


class _Subclasses(ModuleType):
    """The module whose class of tensors without memory others compare theirs with."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802
        return fake_tensor.FakeTensor if _is_asked_by_torch() else _NoTensor


class _NoTensor:
    """What nothing is an instance of."""


def _hidden(truth: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: _is_asked_by_torch() and truth()


def _is_asked_by_torch() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)
