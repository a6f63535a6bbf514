"""Tells which chunks of a global tensor the shard in this process holds.

The record lives on the module that owns the parameter: `fully_shard` replaces parameter objects
but leaves modules in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.runtime.tensor.cuts import Ranges

Box: TypeAlias = tuple[tuple[int, int], ...]  # per dim, [start, stop)

RECORD = "_autopar_chunks"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A shard: the ranges of every dim of the global tensor, laid end to end."""

    global_shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]  # per dim, [start, stop) in the global tensor, in local order

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(sum(stop - start for start, stop in held) for held in self.ranges)

    @property
    def elements(self) -> int:
        """How many elements the shard has."""
        return math.prod(self.local_shape)

    def within_box(self, box: Box) -> Chunks:
        """Narrow them to a box of the shard."""
        ranges = zip(self.ranges, box, strict=True)
        return Chunks(self.global_shape, tuple(within(held, *sides) for held, sides in ranges))


def whole(shape: tuple[int, ...]) -> Chunks:
    """Describe a tensor that this process holds in full."""
    return Chunks(shape, tuple(((0, size),) for size in shape))


def record_chunks(module: nn.Module, name: str, chunks: Chunks) -> None:
    """Remember what the module's own parameter or buffer holds."""
    module.__dict__.setdefault(RECORD, {})[name] = chunks


def recorded_chunks(module: nn.Module, name: str) -> Chunks | None:
    """Recall what the module's own tensor holds on the tensor axis, if it was cut."""
    chunks: Chunks | None = module.__dict__.get(RECORD, {}).get(name)
    return chunks


def chunks_by_name(model: nn.Module) -> dict[str, Chunks]:
    """Tell what every parameter and buffer holds, the rows of `fully_shard` included."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                chunks = recorded_chunks(module, attribute) or whole(tuple(tensor.shape))
                name = f"{prefix}.{attribute}" if prefix else attribute
                found[name] = with_rows(chunks, tensor)
    return found


def with_rows(chunks: Chunks, tensor: Tensor) -> Chunks:
    """Narrow the chunks of a whole shard to the rows that `fully_shard` left here."""
    if not isinstance(tensor, DTensor):
        return chunks
    with unset_fake_temporarily():  # torch counts with tensors whose values it reads
        local, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    ranges = tuple(
        within(held, offset, offset + size)
        for held, offset, size in zip(chunks.ranges, offsets, local, strict=True)
    )
    return Chunks(chunks.global_shape, ranges)


def within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Keep the elements start … stop − 1 of ranges that are laid end to end."""
    kept, offset = [], 0
    for low, high in ranges:
        first, last = max(start, offset), min(stop, offset + high - low)
        if first < last:
            kept.append((low + first - offset, low + last - offset))
        offset += high - low
    return tuple(kept)


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut the elements start … stop − 1 of a flattened tensor into boxes, in their order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from _boxes_of_row(shape, last, start, stop)
        return
    yield from _boxes_of_row(shape, first - 1, start, first * row)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    yield from _boxes_of_row(shape, last, last * row, stop)


def _boxes_of_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[Box]:
    offset = number * math.prod(shape[1:])
    for box in boxes(shape[1:], start - offset, stop - offset):
        yield ((number, number + 1), *box)
