"""Saves and restores buffers that a forward writes, if the forward runs more than once per step.

A recomputed layer starts from the values that its buffers had before the first forward; afterwards
the newer values are put back. Buffers that do not depend on rows (a step count, the power iteration
of a spectral norm) advance once per step, however many microbatches the step has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from autopar.runtime.model.parts import is_inside

__all__ = ["update_once"]  # for scripts

BufferPlace: TypeAlias = tuple[nn.Module, str]
Kept: TypeAlias = dict[BufferPlace, Tensor]


class WrittenBuffers:
    """The buffers that a module's forward writes, found in its first run."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: list[BufferPlace] | None = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the context managers of the first forward and of the second."""
        before: Kept = {}
        return self._first(before), self._again(before)

    @contextmanager
    def _first(self, before: Kept) -> Iterator[None]:
        places = _buffers(self._module) if self._written is None else self._written
        found = [_buffer_at(place) for place in places]
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
        with _in_place_of(places, [before[place] for place in places]):
            yield


def update_once(module: nn.Module, names: Collection[str], *, microbatches: int) -> None:
    """Make the named buffers of a module advance once per step, not once per microbatch.

    Each microbatch starts from the values before the step, in new tensors, because a later backward
    may read values that an earlier microbatch wrote.
    """
    begun: Kept = {}
    runs = 0

    def rewind(*_: Any) -> None:
        nonlocal runs
        if not module.training or not torch.is_grad_enabled():  # an evaluation is not a step
            return
        if runs % microbatches == 0:
            begun.update((place, _buffer_at(place)) for place in _buffers(module, names))
        _put(begun, _copies(begun.values()))
        runs += 1

    module.register_forward_pre_hook(rewind)


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Give a module copies of its buffers inside, and the original buffers back afterwards."""
    places = _buffers(module)
    with _in_place_of(places, _copies(map(_buffer_at, places))):
        yield


@contextmanager
def _in_place_of(places: Sequence[BufferPlace], others: Sequence[Tensor]) -> Iterator[None]:
    """Replace buffers inside by others."""
    own = [_buffer_at(place) for place in places]
    _put(places, others)
    try:
        yield
    finally:
        _put(places, own)


def _put(places: Iterable[BufferPlace], buffers: Sequence[Tensor]) -> None:
    for (module, name), buffer in zip(places, buffers, strict=True):
        module._buffers[name] = buffer


def _copies(buffers: Iterable[Tensor]) -> list[Tensor]:
    """Copy buffers; a buffer of several modules is copied once."""
    found = list(buffers)
    copies = {id(buffer): buffer.clone() for buffer in found}
    return [copies[id(buffer)] for buffer in found]


def _is_written(place: BufferPlace, before: Tensor, version: int) -> bool:
    """Whether a buffer was written or replaced.

    Norms count as writing their buffers: torch's kernels do so without a change of the version.
    """
    return (
        isinstance(place[0], _NormBase)
        or _buffer_at(place) is not before
        or _buffer_at(place)._version != version
    )


def _buffers(module: nn.Module, names: Collection[str] | None = None) -> list[BufferPlace]:
    """Return the places of a module's buffers: of all buffers, or of those with these names."""
    return [
        (child, name)
        for path, child in module.named_modules(remove_duplicate=False)
        for name, buffer in child._buffers.items()
        if buffer is not None
        and (names is None or is_inside(f"{path}.{name}".removeprefix("."), names))
    ]


def _buffer_at(place: BufferPlace) -> Tensor:
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
