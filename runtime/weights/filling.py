"""Turns the numbers of a whole tensor into the part of it that this process holds."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.chunks import recorded_chunks, with_rows
from autopar.runtime.tensor.cuts import Ranges
from autopar.runtime.tensor.shards import Place, Split, local_chunks, put, split_of


class Source(Protocol):
    """A whole tensor, in memory or in a file, of which slices can be read."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read a slice."""
        ...


class ShapeError(ValueError):
    """A source of another shape than the tensor that it should fill."""


def fill(
    group: list[Place],
    source: Source | None,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Replace a meta tensor in all its places by a real one with its part of the source.

    A tensor that was sharded on meta already keeps its chunks, the rows of `fully_shard` included;
    another one is cut as `splits` says. Without a source only memory is taken.
    """
    old = group[0].tensor
    known = recorded_chunks(group[0].module, group[0].attribute)
    chunks = known or local_chunks(tuple(old.shape), split_of(group, splits), axis)
    if chunks.global_shape != shape:
        raise ShapeError(f"{group[0].name} is {chunks.global_shape} here and {shape} in its source")
    mine = with_rows(chunks, old)
    cast = dtype if dtype is not None and old.is_floating_point() else old.dtype
    fresh = torch.empty(mine.local_shape, dtype=cast, device=device)
    if source is not None:
        fresh.copy_(read(source, mine.ranges))
    if isinstance(old, DTensor):
        fresh = DTensor.from_local(
            fresh,
            old.device_mesh,
            old.placements,
            run_check=False,
            shape=old.shape,
            stride=old.stride(),
        )
    put(group, fresh, chunks)


def read(source: Source, ranges: tuple[Ranges, ...], index: tuple[slice, ...] = ()) -> Tensor:
    """Read the ranges of every dim, laid end to end."""
    if len(index) == len(ranges):
        return source[index] if index else source[...]
    dim = len(index)
    pieces = [
        read(source, ranges, (*index, slice(start, stop)))
        for start, stop in ranges[dim] or ((0, 0),)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
