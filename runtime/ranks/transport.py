"""Moves tensors between the ranks of an axis, without gradients.

Over nccl these are its own collectives. Over gloo the sums are made of one all-to-all and an
addition on each rank, in the order of the ranks so that all get the same bits: gloo's own
reduce-scatter takes twice as long on 2 CPU processes and eight times on 4. Two ranks swap: in their
all-to-all nothing goes from a rank to itself. A swap by send and receive is quicker alone, but not
in a training: a step of a small model on two tensor ranks took 32 ms with it, 25 ms with the other.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis

LARGEST_GLOO_SUM_BYTES = 512 * 1024  # beyond it gloo's ring, which moves fewer bytes, wins
LARGEST_SWAPPED_SUM_BYTES = 2 * 2**20  # of two ranks, where the ring moves no fewer
FEW_BYTES = 4 * 1024  # whose sum costs its latency alone

_all_to_all: Any = dist.all_to_all_single
# torch 2.13 renamed both; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of every rank's tensor, on every rank."""
    if _swaps(axis) and x.nbytes <= LARGEST_SWAPPED_SUM_BYTES:
        return _swapped(x, axis).add_(x)
    if axis.is_gloo and x.nbytes <= LARGEST_GLOO_SUM_BYTES:
        return exchanged(x.expand(axis.size, *x.shape), axis).sum(0, dtype=x.dtype)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


class _Coming:
    """A tensor of this rank to which the others' tensors are added once they are here."""

    def __init__(self, own: Tensor) -> None:
        self._own = own
        self._work: dist.Work | None = None
        self._other: Tensor | None = None  # that of the other one of two ranks
        self._every: Tensor | None = None  # those of all ranks, this one's among them

    def value(self) -> Tensor:
        """Return the tensor, the first time after waiting for the sum."""
        if self._work is not None:
            self._work.wait()
        if self._other is not None:
            self._own.add_(self._other)
        elif self._every is not None:
            torch.sum(self._every, 0, dtype=self._own.dtype, out=self._own)
        self._work = self._other = self._every = None
        return self._own


class ComingSum(_Coming):
    """A tensor that turns into the sum, or the mean, of every rank's while other work is done.

    Of 8 bytes a swap takes a core 190 us, an all-to-all 240 us, an all-reduce over gloo 210 us; of
    508 KB 340, 670 and 400 us, and is there after 0.5, 1 and 1.9 ms.
    """

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        super().__init__(x)
        if axis.size == 1:
            return
        assert operation == dist.ReduceOp.SUM or not axis.is_gloo
        if _swaps(axis) and x.nbytes <= LARGEST_SWAPPED_SUM_BYTES:
            self._other = torch.empty_like(x)
            self._work = _started_swap(x, self._other, axis)
        elif axis.is_gloo and x.nbytes <= FEW_BYTES:
            copies = x.expand(axis.size, *x.shape).contiguous()
            self._every = torch.empty_like(copies)
            self._work = _all_to_all(self._every, copies, group=axis.group, async_op=True)
        else:
            self._work = dist.all_reduce(x, op=operation, group=axis.group, async_op=True)


class ComingPart(_Coming):
    """This rank's part of a flat tensor, which turns into the sum, or the mean, of every rank's.

    Over gloo all parts travel to their ranks, which add them up: four processes take 11 ms so for
    13 MB; gloo's all-reduce takes 20 ms, its reduce-scatter 48 ms.
    """

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        parts = x.view(axis.size, -1)
        super().__init__(parts[axis.rank])
        if axis.size == 1:
            return
        assert operation == dist.ReduceOp.SUM or not axis.is_gloo
        if _swaps(axis):
            self._other = torch.empty_like(self._own)
            self._work = _started_swap(parts[1 - axis.rank], self._other, axis)
        elif axis.is_gloo:
            self._every = torch.empty_like(parts)
            self._work = _all_to_all(self._every, parts, group=axis.group, async_op=True)
        else:
            self._work = _reduce_scatter(
                self._own, x, op=operation, group=axis.group, async_op=True
            )


def started_gather(flat: Tensor, axis: Axis) -> tuple[dist.Work, ...]:
    """Start to give every rank all parts of a flat tensor, in place; each brings its own.

    Over gloo every rank broadcasts its part: two processes take 4.9 ms so for 13 MB, four 11 ms;
    gloo's all-gather takes 8.3 and 24 ms. Below 256 KB both take the same time.
    """
    parts = flat.view(axis.size, -1)
    if _swaps(axis):
        return (_started_swap(parts[axis.rank], parts[1 - axis.rank], axis),)
    if not axis.is_gloo:
        work = _all_gather(flat, parts[axis.rank], group=axis.group, async_op=True)
        return () if work is None else (work,)
    works = (
        dist.broadcast(part, group_src=rank, group=axis.group, async_op=True)
        for rank, part in enumerate(parts)
    )
    return tuple(work for work in works if work is not None)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Return every rank's tensor, all of one shape, stacked in the order of the ranks."""
    stack = x.new_empty((axis.size, *x.shape))
    if _swaps(axis):
        stack[axis.rank] = x
        _started_swap(stack[axis.rank], stack[1 - axis.rank], axis).wait()
    else:
        _all_gather(stack.view(-1), x.reshape(-1), group=axis.group)
    return stack


def sum_scattered(stack: Tensor, axis: Axis) -> Tensor:
    """Give every rank its slice of dim 0, summed over all ranks."""
    if _swaps(axis):
        return _swapped(stack[1 - axis.rank], axis).add_(stack[axis.rank])
    if axis.is_gloo:
        return exchanged(stack, axis).sum(0, dtype=stack.dtype)
    mine = stack.new_empty(stack.shape[1:])
    _reduce_scatter(mine.view(-1), stack.reshape(-1), group=axis.group)
    return mine


def exchanged(stack: Tensor, axis: Axis) -> Tensor:
    """Send slice r of dim 0 to rank r, and stack what arrives in the order of the ranks."""
    stack = stack.contiguous()
    arrived = torch.empty_like(stack)
    if _swaps(axis):
        work = _started_swap(stack[1 - axis.rank], arrived[1 - axis.rank], axis)
        arrived[axis.rank] = stack[axis.rank]
        work.wait()
    else:
        _all_to_all(arrived, stack, group=axis.group)
    return arrived


def _swaps(axis: Axis) -> bool:
    return axis.is_gloo and axis.size == 2


def _swapped(mine: Tensor, axis: Axis) -> Tensor:
    """Return the other one of two ranks' tensor."""
    mine = mine.contiguous()
    other = torch.empty_like(mine)
    _started_swap(mine, other, axis).wait()
    return other


def _started_swap(mine: Tensor, other: Tensor, axis: Axis) -> Any:
    """Start to give a tensor to the other one of two ranks, and to take one of the same shape."""
    sizes = [0, 0]
    sizes[1 - axis.rank] = mine.numel()
    return _all_to_all(other.view(-1), mine.view(-1), sizes, sizes, group=axis.group, async_op=True)


def exchanged_pieces(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis
) -> list[Tensor]:
    """Send piece r to rank r; shapes[r] is what comes from there. Pieces may differ in shape."""
    sizes = [math.prod(shape) for shape in shapes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = sent.new_empty(sum(sizes))
    lengths = [piece.numel() for piece in pieces]
    _all_to_all(received, sent, sizes, lengths, group=axis.group)
    flat = torch.split(received, sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]
