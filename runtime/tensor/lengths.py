"""Remembers how long the dims of a microbatch are, of which each tensor rank holds a share.

57 tokens on two ranks are 29 and 28: a rank that has 29 cannot tell 57 from 58. What was cut whole
in this forward is known, and so is what a stage receives; two lengths with equal shares on some
rank (of a text and of its labels, say) are told apart by a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import gathered
from autopar.runtime.tensor.cuts import Cut, cut

RECEIVED = "received_lengths"  # where a stage's module finds those of what it receives

_KNOWN: ContextVar[dict[int, None]] = ContextVar("lengths")  # of the forward that runs


def begin_anew(model: nn.Module) -> None:
    """Have each forward of a model know the lengths of its own microbatch alone."""
    model.register_forward_pre_hook(_forget)


def begins_anew(model: nn.Module) -> bool:
    """Whether the forwards of a model do so."""
    return _forget in model._forward_pre_hooks.values()


def _forget(module: nn.Module, _: object) -> None:
    _KNOWN.set(dict.fromkeys(module.__dict__.get(RECEIVED, ())))


def note_length(whole: int) -> None:
    """Note how long a dim is that is cut."""
    known = _KNOWN.get(None)
    if known is not None:
        known[whole] = None


def cut_of_share(local: int, axis: Axis, device: torch.device) -> Cut:
    """Return the cut of a dim of which this rank holds so many elements."""
    known = _KNOWN.get(None) or {}
    own = [whole for whole in known if _cut(whole, axis.size).sizes[axis.rank] == local]
    if not own:
        return _cut(local * axis.size, axis.size)
    clashes = any(_clash(own[0], other, axis.size) for other in known if other != own[0])
    if not clashes or detect_fake_mode() is not None:
        return _cut(own[0], axis.size)
    shares = gathered(torch.tensor([local], device=device), axis)
    return _cut(int(shares.sum()), axis.size)


def remembered() -> Callable[[], Any]:
    """Return what has the lengths that are known now known again, while a layer runs again."""
    known = _KNOWN.get(None)

    @contextmanager
    def again() -> Iterator[None]:
        if known is None:
            yield
            return
        token = _KNOWN.set(known)
        try:
            yield
        finally:
            _KNOWN.reset(token)

    return again


def receives(module: nn.Module, wholes: Iterable[int]) -> None:
    """Tell a stage's module how long the dims are whose shares it receives."""
    module.__dict__[RECEIVED] = tuple(wholes)


@lru_cache(maxsize=4096)
def _clash(one: int, other: int, size: int) -> bool:
    """Whether some rank holds as much of one length as of another."""
    pairs = zip(_cut(one, size).sizes, _cut(other, size).sizes, strict=True)
    return any(first == second for first, second in pairs)


def _cut(whole: int, size: int) -> Cut:
    return cut(((whole, 1),), size)
