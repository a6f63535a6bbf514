"""Averages flat gradients over data ranks: as they are, in 16 bits, in int8, or by PowerSGD.

int8: each block of elements has a scale of its own. An all-reduce of such numbers would overflow.
So rank r gets piece r of every rank (all-to-all), and adds the pieces up as floats. Where all ranks
need the mean, it is rounded again and gathered. In each message an element takes one byte, and its
share of the block's scale, 4 ÷ 256 bytes.

Each rank adds its own rounding errors (`Feedback.own`) to its next gradients. The rank that adds up
a piece also rounds the mean, and adds this rounding error (`Feedback.mean`) to the next mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import ComingPart, ComingSum, started_gather

# how gradients are sent: the planner's names
NOTHING, HALF, INT8, POWERSGD = "none", "half", "int8", "powersgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """Which ranks average gradients, and which part of the mean each rank gets."""

    shard: Axis  # each of its ranks gets one part; an axis of one rank gets the whole
    replica: Axis  # all of its ranks get the same part
    wire_dtype: torch.dtype | None = None  # for sending gradients; None: the gradients' dtype

    @property
    def ranks(self) -> int:
        """The number of ranks that average gradients."""
        return self.shard.size * self.replica.size

    @property
    def divides_first(self) -> bool:
        """Whether gradients are divided before the sum: gloo has no mean, and fp16 overflows."""
        return self.shard.is_gloo or self.replica.is_gloo or self.wire_dtype is not None

    @property
    def operation(self) -> Any:
        """The reduce operation of the collectives."""
        return dist.ReduceOp.SUM if self.divides_first else dist.ReduceOp.AVG


class ComingMean:
    """This rank's part of a flat tensor, while it is being averaged over all ranks."""

    def __init__(self, flat: Tensor, averaging: Averaging) -> None:
        self._flat = flat
        self._averaging = averaging
        self._wire = flat if averaging.wire_dtype is None else flat.to(averaging.wire_dtype)
        self._part = ComingPart(self._wire, averaging.shard, operation=averaging.operation)
        self._over_copies: ComingSum | None = None
        if averaging.shard.size == 1:
            self.sum_over_replicas()

    def sum_over_replicas(self) -> None:
        """Wait for the part, and start its sum over the ranks that get the same part."""
        if self._over_copies is None:
            axis, operation = self._averaging.replica, self._averaging.operation
            self._over_copies = ComingSum(self._part.value(), axis, operation=operation)

    def value(self) -> Tensor:
        """Wait for the mean, and return this rank's part, which lies in the flat tensor."""
        self.sum_over_replicas()
        assert self._over_copies is not None
        part = self._over_copies.value()
        if self._wire is self._flat:
            return part
        shard = self._averaging.shard
        return self._flat.view(shard.size, -1)[shard.rank].copy_(part)


BLOCK = 256  # elements that share a scale
_LARGEST = 127  # of an int8


def packed(x: Tensor) -> Tensor:
    """Round blocks to int8; return a row for each block: its elements, and the bytes of its scale.

    The scale has the dtype of x. The largest element of a block becomes 127 or -127. One element
    that is nan or infinite makes the whole block nan or infinite.
    """
    rows = x.view(-1, BLOCK)
    scales = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True) / _LARGEST
    steps = rows / scales.clamp_min(torch.finfo(x.dtype).tiny)
    made = torch.empty((len(rows), BLOCK + x.itemsize), dtype=torch.int8, device=x.device)
    made[:, :BLOCK] = steps.round_().clamp_(-_LARGEST, _LARGEST)
    made[:, BLOCK:].view(x.dtype).copy_(scales)
    return made


def unpacked(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the elements of packed blocks, flattened."""
    scales = message[:, BLOCK:].view(dtype)
    return message[:, :BLOCK].to(dtype).mul_(scales).view(-1)


@dataclass(slots=True)
class Feedback:
    """The errors of compressing a bucket, in the gradients' dtype; None before a first step.

    `own` has the errors of this rank's gradients or, if there are replicas, of their sum over the
    shard axis. `mean` has the errors of the mean, in the piece that this rank adds up.
    """

    own: Tensor | None = None
    mean: Tensor | None = None
    bases: tuple[Tensor, ...] = ()  # PowerSGD's Q of each matrix, from the last step

    def rounded(self, x: Tensor, *, is_mean: bool = False) -> Tensor:
        """Add the last errors, in place; return packed blocks, and keep the errors of these."""
        name = "mean" if is_mean else "own"
        errors = getattr(self, name)
        if errors is None:
            errors = torch.zeros_like(x)
            setattr(self, name, errors)
        message = packed(x.add_(errors))
        torch.sub(x, unpacked(message, x.dtype), out=errors)
        errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # a step that overflows leaves none
        return message


class Compressor:
    """Averages buckets in int8; on a GPU on a separate stream, beside the backward."""

    align = BLOCK  # parameters begin at blocks, so all tensor ranks cut a weight into equal blocks

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def stream(self) -> Any:
        """The stream on which gradients are rounded; None on a CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def takes(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient is compressed; others are sent whole."""
        del parameter
        return True

    def started(
        self, flat: Tensor, views: Sequence[Tensor], averaging: Averaging, feedback: Feedback
    ) -> ComingCompressed:
        """Start to add up a flat tensor over all ranks; `views` are the gradients in it."""
        return ComingCompressed(self.summed(flat, views, averaging, feedback), self.stream)

    def summed(
        self, flat: Tensor, views: Sequence[Tensor], averaging: Averaging, feedback: Feedback
    ) -> Iterator[Tensor]:
        """Replace this rank's part of a flat tensor by the sum over all ranks.

        Yields the part before each wait for a message. With copies (`replica`), only the messages
        between copies are compressed: these cross nodes.
        """
        del views
        shard, replica = averaging.shard, averaging.replica
        part = flat.view(shard.size, -1)[shard.rank]
        if replica.size == 1:
            coming = _Exchanged(feedback.rounded(flat), shard)
            yield part
            part.copy_(coming.summed(part.dtype))
            yield part
            return
        summed = ComingPart(flat, shard)
        if shard.size > 1:
            yield part
        coming = _Exchanged(feedback.rounded(summed.value()), replica)
        yield part
        message = feedback.rounded(coming.summed(part.dtype), is_mean=True)
        every = message.new_empty((replica.size, *message.shape))
        every[replica.rank] = message
        work = started_gather(every.view(-1), replica)
        yield part
        if work is not None:
            work.wait()
        part.copy_(unpacked(every.flatten(0, 1), part.dtype))
        yield part

    def first_bases(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the matrices with which PowerSGD begins; int8 has none."""
        del parameters, dtype
        return ()

    def error_rank(self, averaging: Averaging) -> tuple[int, int]:
        """Return this rank's number among those that compress the same elements, and their count.

        In int8 these are the copies or, without copies, the ranks of the shard axis.
        """
        one = averaging.replica if averaging.replica.size > 1 else averaging.shard
        return one.rank, one.size

    def error_sizes(self, elements: int, averaging: Averaging) -> tuple[int, int]:
        """Return the numbers of elements of a bucket's `Feedback.own` and `Feedback.mean`."""
        copies = averaging.replica.size
        own = elements // (averaging.shard.size if copies > 1 else 1)
        return own, own // copies if copies > 1 else 0


class LowRank(Compressor):
    """Sends matrices as products of two thin ones, P·Qᵀ (PowerSGD, Vogels et al. 2019).

    A step begins with the Q of the step before. It sums P = M·Q over the ranks, makes P's columns
    orthonormal, and sums Q = Mᵀ·P. Each rank keeps M − P·Pᵀ·M as the errors of its own matrix. All
    ranks get the whole sum.
    """

    align = 1

    def takes(self, parameter: Tensor) -> bool:
        """Whether the thin matrices have at most half of the parameter's elements."""
        rows = len(parameter) if parameter.dim() > 1 else 0
        return rows > 0 and is_thin(rows, parameter.numel() // rows)

    def summed(
        self, flat: Tensor, views: Sequence[Tensor], averaging: Averaging, feedback: Feedback
    ) -> Iterator[Tensor]:
        """Replace a flat tensor by the sum over all ranks; yield this rank's part before waits."""
        part = flat.view(averaging.shard.size, -1)[averaging.shard.rank]
        if feedback.own is None:
            feedback.own = torch.zeros_like(flat)
        flat.add_(feedback.own)
        matrices = [one.view(len(one), -1) for one in views]
        bases = tuple(map(orthonormal, feedback.bases or self.first_bases(matrices, flat.dtype)))
        products = [one @ basis for one, basis in zip(matrices, bases, strict=True)]
        sums = products
        for sums in _sums(products, averaging):  # noqa: B007
            yield part
        products = [orthonormal(one) for one in sums]
        own = [one.T @ product for one, product in zip(matrices, products, strict=True)]
        for one, product, basis in zip(matrices, products, own, strict=True):
            one.sub_(product @ basis.T)
        feedback.own.copy_(flat)
        for sums in _sums(own, averaging):  # noqa: B007
            yield part
        feedback.bases = tuple(one.clone() for one in sums)
        for one, product, basis in zip(matrices, products, sums, strict=True):
            one.copy_(product @ basis.T)
        yield part

    def first_bases(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the matrices with which PowerSGD begins, one for each parameter."""
        return tuple(first_basis(one.numel() // len(one), one.device, dtype) for one in parameters)

    def error_rank(self, averaging: Averaging) -> tuple[int, int]:
        """Return this rank's number among those that compress the same elements, and their count.

        With PowerSGD these are all ranks.
        """
        shard, replica = averaging.shard, averaging.replica
        return replica.rank * shard.size + shard.rank, averaging.ranks

    def error_sizes(self, elements: int, averaging: Averaging) -> tuple[int, int]:
        """Return the numbers of elements of a bucket's `Feedback.own` and `Feedback.mean`."""
        del averaging
        return elements, 0


RANK = 4  # columns of the thin matrices
_LEAST_COLUMN = 1e-6  # of the norm of all columns: a shorter one is rounding error


def is_thin(rows: int, columns: int) -> bool:
    """Whether two matrices of RANK columns have at most half of the elements of a matrix."""
    return 2 * RANK * (rows + columns) <= rows * columns


def first_basis(rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a matrix of RANK columns without a pattern that a gradient could have."""
    numbers = torch.arange(1, rows + 1, dtype=torch.float64)
    return torch.cos(torch.outer(numbers, numbers[:RANK])).to(device, dtype)


def orthonormal(matrix: Tensor) -> Tensor:
    """Make columns orthonormal, in order.

    A column that depends on those before it would leave only rounding errors, so a column of
    `first_basis` replaces it. Nearly equal inputs then give nearly equal results.
    """
    least = _LEAST_COLUMN * matrix.norm()
    other = first_basis(len(matrix), matrix.device, matrix.dtype)
    made = matrix.new_zeros(matrix.shape)
    for number in range(RANK):
        both = torch.stack((matrix[:, number], other[:, number]), dim=1)
        for _ in range(2):  # once leaves rounding errors
            both = both - made @ (made.T @ both)
        lengths = both.norm(dim=0)
        both = both / lengths.clamp_min(torch.finfo(both.dtype).tiny)
        made[:, number] = torch.where(lengths[0] > least, both[:, 0], both[:, 1])
    return made


def _sums(tensors: Sequence[Tensor], averaging: Averaging) -> Iterator[list[Tensor]]:
    """Add tensors up over all ranks in one message for each axis; yield them before each wait."""
    flat = torch.cat([one.reshape(-1) for one in tensors])
    sums = flat.split([one.numel() for one in tensors])  # type: ignore[no-untyped-call]
    shaped = [one.view(like.shape) for one, like in zip(sums, tensors, strict=True)]
    for axis in (averaging.shard, averaging.replica):
        if axis.size > 1:
            coming = ComingSum(flat, axis)
            yield shaped
            coming.value()
    yield shaped


COMPRESSORS: Mapping[str, type[Compressor]] = {INT8: Compressor, POWERSGD: LowRank}


class ComingCompressed:
    """This rank's part of a flat tensor, while it is being averaged by several messages.

    On a GPU all messages are started at once, because waiting for one only blocks `stream`.
    """

    def __init__(self, steps: Iterator[Tensor], stream: Any) -> None:
        self._steps, self._stream = steps, stream
        self._part = next(steps) if stream is None else self._queued(steps)

    def _queued(self, steps: Iterator[Tensor]) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            *_, part = steps
        return part

    def sum_over_replicas(self) -> None:
        """Wait for the message that is under way, and start the next one."""
        self._part = next(self._steps, self._part)

    def value(self) -> Tensor:
        """Wait for the mean, and return this rank's part, which lies in the flat tensor."""
        for part in self._steps:
            self._part = part
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return self._part


class _Exchanged:
    """An all-to-all of packed blocks: rank r gets piece r of every rank."""

    def __init__(self, message: Tensor, axis: Axis) -> None:
        self._sent, self._received = message, torch.empty_like(message)
        self._ranks = axis.size
        self._work = dist.all_to_all_single(
            self._received, message, group=axis.group, async_op=True
        )

    def summed(self, dtype: torch.dtype) -> Tensor:
        """Wait for the pieces, and return their sum."""
        if self._work is not None:
            self._work.wait()
        return unpacked(self._received, dtype).view(self._ranks, -1).sum(0)
