"""Moves tensors between the ranks of an axis, without gradients.

Over nccl these are its own collectives. Over gloo the sums are made of one all-to-all and an
addition on each rank, in the order of the ranks so that all get the same bits: gloo's own
reduce-scatter takes twice as long on 2 CPU processes and eight times on 4. A swap of two ranks
by send and receive is quicker alone (of 4 KB, 70 us against 170 us at best), but not in a training:
a step of a small model on two tensor ranks took 32 ms with it, 25 ms with the all-to-all.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.mesh import Axis

LARGEST_GLOO_SUM_BYTES = 512 * 1024  # beyond it gloo's ring, which moves fewer bytes, wins
FEW_BYTES = 4 * 1024  # whose sum costs its latency alone

# torch 2.13 renamed both; the old names warn there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of every rank's tensor, on every rank."""
    if axis.is_gloo and x.numel() * x.element_size() <= LARGEST_GLOO_SUM_BYTES:
        return exchanged(x.expand(axis.size, *x.shape), axis).sum(0, dtype=x.dtype)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


class ComingSum:
    """A tensor that turns into the sum, or the mean, of every rank's while other work is done.

    Over gloo a few bytes take a core 260 us by an all-to-all, 330 us by an all-reduce.
    """

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        self._total = x
        self._arrived: Tensor | None = None
        self._work: dist.Work | None = None
        if axis.size == 1:
            return
        if axis.is_gloo and x.numel() * x.element_size() <= FEW_BYTES:
            assert operation == dist.ReduceOp.SUM
            copies = x.expand(axis.size, *x.shape).contiguous()
            self._arrived = torch.empty_like(copies)
            self._work = dist.all_to_all_single(
                self._arrived, copies, group=axis.group, async_op=True
            )
        else:
            self._work = dist.all_reduce(x, op=operation, group=axis.group, async_op=True)

    def value(self) -> Tensor:
        """Return the tensor, the first time after waiting for the sum."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._arrived is not None:
            torch.sum(self._arrived, 0, dtype=self._total.dtype, out=self._total)
            self._arrived = None
        return self._total


class ComingPart:
    """This rank's part of a flat tensor, which turns into the sum, or the mean, of every rank's.

    Over gloo all parts travel to their ranks, which add them up: two processes take 7.5 ms so for
    13 MB, four 11 ms; gloo's all-reduce takes 10.5 and 20 ms, its reduce-scatter 18 and 48 ms.
    Below 256 KB all three are within 0.2 ms.
    """

    def __init__(self, x: Tensor, axis: Axis, *, operation: Any = dist.ReduceOp.SUM) -> None:
        parts = x.view(axis.size, -1)
        self._own = parts[axis.rank]
        self._arrived: Tensor | None = None
        self._work: dist.Work | None = None
        if axis.is_gloo:
            assert operation == dist.ReduceOp.SUM
            self._arrived = torch.empty_like(parts)
            self._work = dist.all_to_all_single(
                self._arrived, parts, group=axis.group, async_op=True
            )
        elif axis.size > 1:
            self._work = _reduce_scatter(
                self._own, x, op=operation, group=axis.group, async_op=True
            )

    def value(self) -> Tensor:
        """Return the part, in the memory of the tensor, the first time after waiting for it."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._arrived is not None:
            torch.sum(self._arrived, 0, out=self._own)
            self._arrived = None
        return self._own


def started_gather(flat: Tensor, axis: Axis) -> tuple[dist.Work, ...]:
    """Start to give every rank all parts of a flat tensor, in place; each brings its own.

    Over gloo every rank broadcasts its part: two processes take 4.9 ms so for 13 MB, four 11 ms;
    gloo's all-gather takes 8.3 and 24 ms. Below 256 KB both take the same time.
    """
    parts = flat.view(axis.size, -1)
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
    _all_gather(stack.view(-1), x.reshape(-1), group=axis.group)
    return stack


def sum_scattered(stack: Tensor, axis: Axis) -> Tensor:
    """Give every rank its slice of dim 0, summed over all ranks."""
    if axis.is_gloo:
        return exchanged(stack, axis).sum(0, dtype=stack.dtype)
    mine = stack.new_empty(stack.shape[1:])
    _reduce_scatter(mine.view(-1), stack.reshape(-1), group=axis.group)
    return mine


def exchanged(stack: Tensor, axis: Axis) -> Tensor:
    """Send slice r of dim 0 to rank r, and stack what arrives in the order of the ranks."""
    stack = stack.contiguous()
    arrived = torch.empty_like(stack)
    dist.all_to_all_single(arrived, stack, group=axis.group)
    return arrived


def exchanged_pieces(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: Axis
) -> list[Tensor]:
    """Send piece r to rank r; shapes[r] is what comes from there. Pieces may differ in shape."""
    sizes = [math.prod(shape) for shape in shapes]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    received = sent.new_empty(sum(sizes))
    lengths = [piece.numel() for piece in pieces]
    dist.all_to_all_single(received, sent, sizes, lengths, group=axis.group)
    flat = torch.split(received, sizes)
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]
