"""Prices conversions between layouts, and the messages of split ops and synchronised batch norms.

A synchronised batch norm takes statistics over the rows of all data ranks:

    forward    all-gather of every rank's means, variances and number of rows
    backward   all-reduce of two sums per channel; a recomputed layer gathers again

The layer waits for both. If the host does not run ahead, the layer also waits for the dispatch of
small ops that take the device no time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.kernels.rates import Throughput
from autopar.planner.graph.layouts import Conversion, LocalAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The conversion of a tensor, and a rank's bytes before and after.

    If `is_contiguous`, a rank's part is one piece of memory, so a collective needs no copy.
    """

    step: Conversion
    produced_bytes: int
    needed_bytes: int
    is_contiguous: bool
    # of the products that inductor fuses with the messages, forward and backward; 0 without any
    beside_seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionCost:
    """The time of a conversion, and the part of it that collectives take."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_communication_seconds: float = 0.0
    backward_communication_seconds: float = 0.0
    backward_dispatches: int = 0


FREE = ConversionCost()
DISPATCHES = 2  # an autograd function, and the collective or copy in it


def conversion_cost(
    tensor: Converted, *, degree: int, shape: GroupShape, rates: Throughput, has_gradient: bool
) -> ConversionCost:
    """Return the cost of converting one layout to another."""
    forward_beside, backward_beside = tensor.beside_seconds
    forward, forward_wire = _seconds(
        tensor.step.forward, tensor, degree, shape, rates, forward_beside
    )
    if not has_gradient:
        return ConversionCost(forward_seconds=forward, forward_communication_seconds=forward_wire)
    backward, backward_wire = _seconds(
        tensor.step.backward, tensor, degree, shape, rates, backward_beside
    )
    return ConversionCost(
        forward_seconds=forward,
        backward_seconds=backward,
        forward_communication_seconds=forward_wire,
        backward_communication_seconds=backward_wire,
        backward_dispatches=DISPATCHES,
    )


def _seconds(
    step: Collective | LocalAction,
    tensor: Converted,
    degree: int,
    shape: GroupShape,
    rates: Throughput,
    beside_seconds: float,
) -> tuple[float, float]:
    """Return the seconds of a conversion's forward or backward, and of the collective in it.

    If products are computed meanwhile, these are the seconds in addition to theirs.
    """
    part = min(tensor.produced_bytes, tensor.needed_bytes)
    whole = max(tensor.produced_bytes, tensor.needed_bytes)
    if isinstance(step, LocalAction):
        return _local_seconds(step, part, whole, rates), 0.0
    if step is Collective.ALL_REDUCE:
        payload = whole
    elif step is Collective.ALL_TO_ALL:
        payload = part
    else:
        payload = part * degree  # parts of unequal size are padded
    wire = collective_seconds(step, payload, shape)
    if beside_seconds:
        wire = fused_seconds(beside_seconds, wire, pieces=degree) - beside_seconds
    if tensor.is_contiguous or step is Collective.ALL_REDUCE:
        return wire, wire
    return wire + memory_seconds(2 * payload, rates=rates), wire


def fused_seconds(product_seconds: float, message_seconds: float, *, pieces: int) -> float:
    """Return the time of a product and a message that run side by side, piece by piece.

        T = max(C, M) + min(C, M) ÷ n

    C is the product's time, M that of the message, n the number of pieces, which is that of ranks.
    The first piece of one of them runs alone. This is how torch's fused ops work
    (torch/distributed/_symmetric_memory: a stream copies the next piece from another rank while the
    piece before is multiplied). Leaves out that products of a piece run at a lower rate, barriers
    between ranks, and that copies between ranks may be faster or slower than nccl's messages.
    """
    return max(product_seconds, message_seconds) + min(product_seconds, message_seconds) / pieces


def _local_seconds(step: LocalAction, part: int, whole: int, rates: Throughput) -> float:
    """Return the seconds to copy a slice, or to pad or mask: these write the whole tensor."""
    moved = {
        LocalAction.NOTHING: 0,
        LocalAction.SLICE: 2 * part,
        LocalAction.PAD: whole + part,
        LocalAction.MASK: 2 * whole,
    }[step]
    return memory_seconds(moved, rates=rates) if moved else 0.0


_ELEMENT_BYTES = 4  # statistics, and numbers inside split ops, are sent in fp32
# Ops that runtime/data_parallel/batch_norm.py dispatches in addition to those of a local norm.
_FORWARD_OPS, _BACKWARD_OPS = 22, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The batch norms of some layers, by their numbers of channels on one rank."""

    norms: tuple[int, ...] = ()
    again: tuple[int, ...] = ()  # those that are recomputed in the backward
    dispatch_seconds: float = 0.0  # of one small op


NO_STATISTICS = Statistics()


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronising:
    """How long a microbatch waits for statistics, and the number and bytes of the collectives."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    collectives: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Synchronising) -> Synchronising:
        """Return the sums of both."""
        return Synchronising(
            forward_seconds=self.forward_seconds + other.forward_seconds,
            backward_seconds=self.backward_seconds + other.backward_seconds,
            collectives=self.collectives + other.collectives,
            payload_bytes=self.payload_bytes + other.payload_bytes,
        )


NO_WAIT = Synchronising()


@lru_cache(maxsize=4096)
def synchronising(statistics: Statistics, group: GroupShape) -> Synchronising:
    """Return how long a layer waits for statistics of the data ranks in `group`."""
    if group.ranks == 1 or not statistics.norms:
        return NO_WAIT
    gathered = [_gathered_bytes(channels, group) for channels in statistics.norms]
    again = [_gathered_bytes(channels, group) for channels in statistics.again]
    summed = [2 * channels * _ELEMENT_BYTES for channels in statistics.norms]
    forward_ops = _FORWARD_OPS * statistics.dispatch_seconds
    backward_ops = _BACKWARD_OPS * statistics.dispatch_seconds
    return Synchronising(
        forward_seconds=_statistics_seconds(Collective.ALL_GATHER, gathered, group)
        + len(gathered) * forward_ops,
        backward_seconds=_statistics_seconds(Collective.ALL_REDUCE, summed, group)
        + _statistics_seconds(Collective.ALL_GATHER, again, group)
        + len(summed) * backward_ops
        + len(again) * forward_ops,
        collectives=len(gathered) + len(summed) + len(again),
        payload_bytes=sum((*gathered, *summed, *again)),
    )


def _gathered_bytes(channels: int, group: GroupShape) -> int:
    return (2 * channels + 1) * _ELEMENT_BYTES * group.ranks


def numbers_seconds(sends: Iterable[tuple[Collective, int]], rows: int, shape: GroupShape) -> float:
    """Return the seconds of the collectives inside a split op, which send numbers of each row."""
    ranks = {Collective.ALL_GATHER: shape.ranks}  # its payload counts all ranks' numbers
    return sum(
        collective_seconds(one, numbers * ranks.get(one, 1) * rows * _ELEMENT_BYTES, shape)
        for one, numbers in sends
    )


def _statistics_seconds(
    collective: Collective, payloads: Iterable[int], group: GroupShape
) -> float:
    return sum(collective_seconds(collective, size, group) for size in payloads)
