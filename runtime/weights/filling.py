"""Fills this process's part of a tensor from the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.shards import (
    Split,
    TensorPlace,
    local_chunks,
    put,
    recorded_chunks,
    split_of,
    with_rows,
)
from autopar.runtime.tensor.slices import Ranges


class TensorSource(Protocol):
    """A whole tensor, in memory or in a file, that can be sliced."""

    def __getitem__(self, index: Any, /) -> Tensor:
        """Read a slice."""
        ...


class ShapeError(ValueError):
    """A source has another shape than the tensor that it should fill."""


def fill(
    group: list[TensorPlace],
    source: TensorSource | None,
    splits: Mapping[str, Split],
    axis: Axis,
    *,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Replace a meta tensor, in all its places, by a real one with its part of the source.

    A tensor that was sharded on meta keeps its chunks, including the rows of `fully_shard`. Any
    other tensor is cut according to `splits`. Without a source, memory is only allocated.
    """
    from torch.distributed.tensor import DTensor  # slow to import, and planning needs it not

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


def read(source: TensorSource, ranges: tuple[Ranges, ...], index: tuple[slice, ...] = ()) -> Tensor:
    """Read the ranges of every dim, concatenated."""
    if len(index) == len(ranges):
        return source[index] if index else source[...]
    dim = len(index)
    pieces = [
        read(source, ranges, (*index, slice(start, stop)))
        for start, stop in ranges[dim] or ((0, 0),)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


_WIDE = {torch.complex64: torch.complex128}


def in_float64(model: nn.Module) -> nn.Module:
    """Convert a model to float64, complex tensors to complex128, in place; return it.

    model.to(torch.float64) would drop the imaginary parts of complex tensors.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(_wide(tensor))
    return model


def _wide(tensor: Tensor) -> torch.dtype:
    return _WIDE.get(tensor.dtype, tensor.dtype if tensor.is_complex() else torch.float64)
