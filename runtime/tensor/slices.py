"""Cuts, gathers, pads and exchanges a tensor along a dim, without gradients."""

import torch
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import exchanged, exchanged_pieces, gathered, sum_scattered
from autopar.runtime.tensor.cuts import Cut, Ranges


def pick(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Lay the ranges of a dim end to end in a new contiguous tensor."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


def slice_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Keep this rank's slice of a whole dim."""
    return pick(x, dim, held.ranges[axis.rank])


def pad_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Put this rank's slice in its place among zeros."""
    whole = x.new_zeros(_resized(x, dim, held.whole))
    offset = 0
    for start, stop in held.ranges[axis.rank]:
        whole.narrow(dim, start, stop - start).copy_(x.narrow(dim, offset, stop - start))
        offset += stop - start
    return whole


def gather_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Lay every rank's slice of a dim in its place."""
    if held.is_even:
        return _merge(gathered(x, axis), dim)
    shapes = [_resized(x, dim, size) for size in held.sizes]
    return _assemble(exchanged_pieces([x] * axis.size, shapes, axis), dim, held)


def sum_scatter_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Sum every rank's tensor and keep this rank's slice of a dim."""
    if held.is_even:
        return sum_scattered(_split(x, dim, axis.size), axis)
    pieces = [pick(x, dim, ranges) for ranges in held.ranges]
    shape = pieces[axis.rank].shape
    return torch.stack(exchanged_pieces(pieces, [shape] * axis.size, axis)).sum(0, dtype=x.dtype)


def exchange_along(
    x: Tensor, gather_dim: int, split_dim: int, gather_cut: Cut, split_cut: Cut, axis: Axis
) -> Tensor:
    """Make one dim whole while cutting another."""
    if gather_cut.is_even and split_cut.is_even:
        return _merge(exchanged(_split(x, split_dim, axis.size), axis), gather_dim)
    pieces = [pick(x, split_dim, ranges) for ranges in split_cut.ranges]
    mine = _resized(x, split_dim, split_cut.sizes[axis.rank])
    shapes = [(*mine[:gather_dim], size, *mine[gather_dim + 1 :]) for size in gather_cut.sizes]
    return _assemble(exchanged_pieces(pieces, shapes, axis), gather_dim, gather_cut)


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _split(x: Tensor, dim: int, count: int) -> Tensor:
    """Stack equal slices of a dim in a new dim 0."""
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0)


def _merge(stack: Tensor, dim: int) -> Tensor:
    """Lay the slices of dim 0 along the dim that they were cut from, contiguous for a view."""
    return stack.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _assemble(pieces: list[Tensor], dim: int, held: Cut) -> Tensor:
    """Lay each rank's ranges where they belong in the whole dim."""
    placed = []
    for piece, ranges in zip(pieces, held.ranges, strict=True):
        offset = 0
        for start, stop in ranges:
            placed.append((start, piece.narrow(dim, offset, stop - start)))
            offset += stop - start
    placed.sort(key=lambda item: item[0])
    return torch.cat([piece for _, piece in placed], dim)
