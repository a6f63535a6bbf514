"""Lets a forward that runs again find the objects that it is given as they were the first time.

A cache of keys and values, a dict that layers share: what the first run wrote there, the second
would find. Tensors and modules are not copied.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from io import BytesIO
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]

_SHARED = (Tensor, nn.Module, FunctionType)
_PLAIN = (
    *_SHARED, type(None), bool, int, float, complex, str, bytes, type, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def run_alike(
    forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Forward, tuple[Any, ...], dict[str, Any]]:
    """Return a forward that runs on the arguments, then on what these were, and the latter.

    It is handed the latter each time: that is what is kept until the backward.
    """
    copied = _copies((args, kwargs))
    if copied is None:
        return forward, args, kwargs
    given = [(args, kwargs)]

    def run(*_: Any, **__: Any) -> Any:
        own_args, own_kwargs = given.pop() if given else copied()
        return forward(*own_args, **own_kwargs)

    return run, *copied()


def _copies(given: Arguments) -> Callable[[], Arguments] | None:
    """Return what makes arguments as these are now; None where they cannot be written to."""
    args, kwargs = given
    if all(map(_is_plain, (*args, *kwargs.values()))):
        return None
    shared, written = list[Any](), BytesIO()
    try:
        _Writer(written, shared).dump(given)
    except (pickle.PicklingError, TypeError, AttributeError):
        return None  # of a local class, say: the layer has to do without copies

    def copied() -> Arguments:
        found: Arguments = _Reader(BytesIO(written.getbuffer()), shared).load()
        return found

    return copied


def _is_plain(value: Any) -> bool:
    """Whether nothing can be written to a value, or it is a tensor or a module."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


class _Writer(pickle.Pickler):
    """Writes the structure of objects, and lists what they share with their copies."""

    def __init__(self, file: BytesIO, shared: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        """Return the number of what is not copied."""
        if not isinstance(obj, _SHARED):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Reader(pickle.Unpickler):
    """Reads what a writer wrote."""

    def __init__(self, file: BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> Any:
        """Return what was not copied."""
        return self.shared[pid]
