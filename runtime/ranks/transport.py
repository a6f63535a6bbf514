"""Moves tensors between the ranks of an axis, without gradients.

What a layer waits for travels by torch's functional collectives, which `torch.compile` sees
through. Sums and parts of a bucket travel in its own memory while other work is done.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis

_functional: Any = torch.ops._c10d_functional
# torch 2.13 renamed both; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of every rank's tensor, on every rank."""
    return _waited(_functional.all_reduce(x.contiguous(), "sum", _name(axis)))


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return every rank's tensor, all of one shape, stacked in the order of the ranks."""
    flat = x.contiguous().view(-1)
    every = _waited(_functional.all_gather_into_tensor(flat, axis.size, _name(axis)))
    return every.view(axis.size, *x.shape)


def sum_scattered(stack: Tensor, axis: Axis) -> Tensor:
    """Give every rank its slice of dim 0, summed over all ranks."""
    flat = stack.contiguous().view(-1)
    mine = _waited(_functional.reduce_scatter_tensor(flat, "sum", axis.size, _name(axis)))
    return mine.view(stack.shape[1:])


def exchanged(stack: Tensor, axis: Axis) -> Tensor:
    """Send slice r of dim 0 to rank r, and stack what arrives in the order of the ranks."""
    sizes = [1] * axis.size
    return _waited(_functional.all_to_all_single(stack.contiguous(), sizes, sizes, _name(axis)))


def exchanged_pieces(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis
) -> list[Tensor]:
    """Send piece r to rank r; shapes[r] is what comes from there. Pieces may differ in shape."""
    sizes = [math.prod(shape) for shape in shapes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    lengths = [piece.numel() for piece in pieces]
    received = _waited(_functional.all_to_all_single(sent, sizes, lengths, _name(axis)))
    flat = torch.split(received, sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


class _Coming:
    """A tensor of this rank that turns into what all ranks make of theirs."""

    def __init__(self, own: Tensor) -> None:
        self._own = own
        self._work: dist.Work | None = None

    def value(self) -> Tensor:
        """Return the tensor, the first time after waiting for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._own


class ComingSum(_Coming):
    """A tensor that turns into the sum, or the mean, of every rank's while other work is done."""

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        super().__init__(x)
        if axis.size > 1:
            self._work = dist.all_reduce(x, op=operation, group=axis.group, async_op=True)


class ComingPart(_Coming):
    """This rank's part of a flat tensor, which turns into the sum, or the mean, of every rank's."""

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        super().__init__(x.view(axis.size, -1)[axis.rank])
        if axis.size > 1:
            self._work = _reduce_scatter(
                self._own, x, op=operation, group=axis.group, async_op=True
            )


def started_gather(flat: Tensor, axis: Axis) -> dist.Work | None:
    """Start to give every rank all parts of a flat tensor, in place; each brings its own."""
    part = flat.view(axis.size, -1)[axis.rank]
    work: dist.Work | None = _all_gather(flat, part, group=axis.group, async_op=True)
    return work


def _waited(coming: Any) -> Tensor:
    arrived: Tensor = _functional.wait_tensor(coming)
    return arrived


def _name(axis: Axis) -> str:
    assert axis.group is not None, "an axis of one rank moves nothing"
    return axis.group.group_name
