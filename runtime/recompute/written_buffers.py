"""Keeps what a forward writes to buffers apart where it runs more often than a step has it.

A layer that runs again in the backward finds its buffers as they were the first time, and leaves
them as they are. What does not depend on rows (a count of steps, the power iteration of a spectral
norm) is written once in a step, however many microbatches that has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from autopar.runtime.model.parts import is_held

Place: TypeAlias = tuple[nn.Module, str]
Kept: TypeAlias = dict[Place, Tensor]


class WrittenBuffers:
    """The buffers that a module's forward writes, found when it runs for the first time."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: list[Place] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return what surrounds a forward, and what surrounds it when it runs again."""
        before: Kept = {}
        return self._first(before), self._again(before)

    @contextmanager
    def _first(self, before: Kept) -> Iterator[None]:
        places = _buffers(self._module) if self._written is None else self._written
        found = [_of(place) for place in places]
        versions = [buffer._version for buffer in found]
        before.update(zip(places, _copies(found), strict=True))
        yield
        if self._written is None:
            self._written = [
                place
                for place, buffer, version in zip(places, found, versions, strict=True)
                if _is_written(place, buffer, version)
            ]
            for place in before.keys() - set(self._written):
                del before[place]

    @contextmanager
    def _again(self, before: Kept) -> Iterator[None]:
        places = self._written or []
        now = [_of(place) for place in places]
        for module, name in places:
            module._buffers[name] = before[module, name]
        try:
            yield
        finally:
            for (module, name), buffer in zip(places, now, strict=True):
                module._buffers[name] = buffer


def update_once(module: nn.Module, names: Collection[str], *, microbatches: int) -> None:
    """Have a module, which runs once for each microbatch, write some of its buffers once in a step.

    Each microbatch finds them as the first one of its step did, in tensors of its own: backwards
    that are still to come may read what an earlier one wrote.
    """
    begun: Kept = {}
    runs = 0

    def rewind(*_: Any) -> None:
        nonlocal runs
        if not module.training or not torch.is_grad_enabled():  # an evaluation is no step
            return
        if runs % microbatches == 0:
            begun.update((place, _of(place)) for place in _buffers(module, names))
        for (owner, name), fresh in zip(begun, _copies(begun.values()), strict=True):
            owner._buffers[name] = fresh
        runs += 1

    module.register_forward_pre_hook(rewind)


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Have what is written to the buffers of a module forgotten afterwards."""
    places = _buffers(module)
    found = [_of(place) for place in places]
    for (owner, name), fresh in zip(places, _copies(found), strict=True):
        owner._buffers[name] = fresh
    try:
        yield
    finally:
        for (owner, name), buffer in zip(places, found, strict=True):
            owner._buffers[name] = buffer


def _copies(buffers: Iterable[Tensor]) -> list[Tensor]:
    """Copy buffers, one that several modules share once."""
    found = list(buffers)
    copies = {id(buffer): buffer.clone() for buffer in found}
    return [copies[id(buffer)] for buffer in found]


def _is_written(place: Place, before: Tensor, version: int) -> bool:
    """Whether a buffer is another one now; torch's norms write statistics without a mark."""
    return (
        isinstance(place[0], _NormBase)
        or _of(place) is not before
        or _of(place)._version != version
    )


def _buffers(module: nn.Module, names: Collection[str] | None = None) -> list[Place]:
    """Return where a module has its buffers, or those of some names."""
    return [
        (child, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is not None
        and (names is None or is_held(f"{path}.{name}".removeprefix("."), names))
    ]


def _of(place: Place) -> Tensor:
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
