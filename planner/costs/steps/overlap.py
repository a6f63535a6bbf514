"""Turns layers and their collectives into seconds, with computing and communicating overlapped.

Every function simulates two streams, as on a GPU: one computes the layers in order, the other runs
collectives in the order in which they are issued, one at a time. Parameters:

    slowdown   how much longer computing takes while a collective runs, as a fraction (0.1: a
               tenth), because collectives occupy multiprocessors and memory bandwidth
    Seconds    a formula or a measurement: the seconds of a collective for the bytes of the whole
               (unsharded) tensor, α included

Leaves out that computing slows collectives down, and two collectives at once (a reduction between
nodes beside a gather within one).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.conversions import NO_STATISTICS, Statistics
from autopar.planner.precision import Compression

Seconds = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """A layer's compute times, and the bytes of its parameters and gradients.

    It stands for `count` equal layers in a row.
    """

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float
    gradient_bytes: float
    whole_gradient_bytes: float = 0.0  # the part of them that is sent without compression
    thin_gradient_bytes: float = 0.0  # what PowerSGD sends in place of the rest
    float8_weights: tuple[tuple[int, int], ...] = ()  # rows and elements; gathered in float8
    statistics: Statistics = NO_STATISTICS  # of batch norms synchronised over data ranks
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlapped:
    """The times of computing and communicating at once."""

    compute_seconds: float  # alone
    communication_seconds: float  # alone
    slowdown_seconds: float  # added to computing by collectives that run beside it
    exposed_seconds: float  # collectives run and nothing is computed

    @property
    def total_seconds(self) -> float:
        """The time from the start of the first layer or collective to the end of the last."""
        return self.compute_seconds + self.slowdown_seconds + self.exposed_seconds


def summing(
    timed: Callable[[Collective, GroupShape], Seconds],
    parts: GroupShape | None,
    copies: GroupShape,
    compression: Compression,
) -> Seconds:
    """Return a function from the bytes of gradients that are sent to the seconds of their sum.

    Each rank of `parts` gets a part of the sum, by a reduce-scatter; None if the sum is not
    divided. Then the ranks of `copies` add up equal parts, by an all-reduce. If ranks keep the
    errors of compression, an all-to-all and an all-gather replace this all-reduce. The
    reduce-scatter then sends fp32; if there are no copies, an all-to-all replaces it. The thin
    matrices of PowerSGD are summed by all-reduces, and not divided. Leaves out that torch runs the
    all-reduce of one layer beside the reduce-scatter of the next.
    """
    if compression.is_low_rank:
        first = () if parts is None else (timed(Collective.ALL_REDUCE, parts),)
        sums = (*first, timed(Collective.ALL_REDUCE, copies))
        return lambda size: sum(one(size) for one in sums)
    parts = None if parts is None or parts.ranks == 1 else parts
    if parts is not None and copies.ranks == 1:
        keeps = compression.keeps_lost
        return timed(Collective.ALL_TO_ALL if keeps else Collective.REDUCE_SCATTER, parts)
    exchanged = (Collective.ALL_TO_ALL, Collective.ALL_GATHER)
    ways = exchanged if compression.keeps_lost else (Collective.ALL_REDUCE,)
    steps = [timed(one, copies) for one in ways]
    if parts is None:
        return lambda size: sum(step(size) for step in steps)
    scatter, degree = timed(Collective.REDUCE_SCATTER, parts), parts.ranks
    share = compression.share if compression.keeps_lost else 1.0
    return lambda size: scatter(size / share) + sum(step(size / degree) for step in steps)


def bucketed_reduction(
    layers: Sequence[LayerLoad], reduction_seconds: Seconds, *, bucket_bytes: float, slowdown: float
) -> Overlapped:
    """Return a backward that reduces gradients bucket by bucket: DDP; ZeRO-1/2 by reduce-scatter.

    Layers are given in forward order and run in reverse. A bucket takes gradients until it holds
    `bucket_bytes` or more, then it is reduced:

        start(bucket) = max(its last gradient, end of the bucket before)

    With gradient accumulation this is the backward of the last microbatch. Leaves out DDP's smaller
    first bucket (1 MiB), and copying gradients into buckets.
    """
    streams = _Streams()
    filled_bytes = 0.0
    for layer in reversed(layers):
        streams = streams.compute(layer.backward_seconds, slowdown)
        filled_bytes += layer.gradient_bytes
        if filled_bytes >= bucket_bytes:
            streams = streams.communicate(reduction_seconds(filled_bytes))
            filled_bytes = 0.0
    if filled_bytes:
        streams = streams.communicate(reduction_seconds(filled_bytes))
    return streams.joined().result()


def buckets(layers_bytes: Iterable[float], bucket_bytes: float) -> Iterator[float]:
    """Yield the bytes of each bucket that layers fill in this order; a layer is never divided."""
    filled_bytes = 0.0
    for size in layers_bytes:
        filled_bytes += size
        if filled_bytes >= max(bucket_bytes, 1):
            yield filled_bytes
            filled_bytes = 0.0
    if filled_bytes:
        yield filled_bytes


def largest_bucket(layers_bytes: Sequence[int], bucket_bytes: int) -> float:
    """Return the most bytes of a bucket, if any of these layers may be the first in it.

    It is full once it has `bucket_bytes` or more, so it has less than that before its last layer.
    """
    ends = np.cumsum(layers_bytes, dtype=np.float64)
    starts = ends - layers_bytes
    full = np.searchsorted(ends, starts + bucket_bytes)
    return float((ends[np.minimum(full, len(ends) - 1)] - starts).max())


def sharded_forward(
    layers: Sequence[LayerLoad], gather_seconds: Seconds, *, slowdown: float
) -> Overlapped:
    """Return a forward of ZeRO-3 (fully_shard): layer k + 1 is gathered while layer k computes.

        seconds = G(0) + Σ_k max(forward(k), G(k + 1))     for slowdown 0, with the gathers G

    A gather starts when the layer before starts to compute, as fully_shard prefetches one layer.
    Leaves out copying out of the gathered buffer, which runs on the compute stream.
    """
    streams = _Streams().communicate(gather_seconds(layers[0].parameter_bytes)).joined()
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if following is not None:
            streams = streams.communicate(gather_seconds(following.parameter_bytes))
        streams = streams.compute(layer.forward_seconds, slowdown).joined()
    return streams.result()


def sharded_backward(
    layers: Sequence[LayerLoad],
    gather_seconds: Seconds,
    scatter_seconds: Seconds,
    *,
    slowdown: float,
) -> Overlapped:
    """Return a backward of ZeRO-3 (fully_shard): gathers ahead, gradients reduce-scattered after.

    In reverse order, while layer k computes its backward, the gradients of layer k + 1 are
    reduce-scattered (R), then layer k − 1 is gathered (G):

        seconds = G(n − 1) + Σ_k max(backward(k), R(k + 1) + G(k − 1)) + R(0)    for slowdown 0

    A gather waits for the reduction issued before it. If gathers take no time
    (reshard_after_forward is False), computing never waits. With recomputation the backward seconds
    include the second forward, which gathers nothing more. For accumulation without reduction,
    `scatter_seconds` is zero.
    """
    backward = tuple(reversed(layers))
    streams = _Streams().communicate(gather_seconds(backward[0].parameter_bytes)).joined()
    for layer, following in zip(backward, [*backward[1:], None], strict=True):
        ahead_seconds = gather_seconds(following.parameter_bytes) if following else 0.0
        streams = streams.communicate(ahead_seconds)
        gathered = streams.communication_end_seconds if ahead_seconds else 0.0
        streams = streams.compute(layer.backward_seconds, slowdown)
        streams = streams.communicate(scatter_seconds(layer.gradient_bytes)).waiting_until(gathered)
    return streams.joined().result()


def gathered_after_optimizer_seconds(
    layers: Sequence[LayerLoad], gather_seconds: Seconds, *, bucket_bytes: float
) -> float:
    """Return Σ G(bucket): ZeRO-1 gathers the updated parameters, and nothing overlaps with it."""
    return sum(map(gather_seconds, buckets((one.parameter_bytes for one in layers), bucket_bytes)))


def forward_during_gather(
    layers: Sequence[LayerLoad], gather_seconds: Seconds, *, slowdown: float
) -> Overlapped:
    """Return ZeRO-2's forward, which begins while updated parameters are being gathered.

    All layers are gathered one after another from the start, in forward order:

        start(layer) = max(end of the layer before, Σ G of the layers up to its own)

    This is the first microbatch of a step; the others find their parameters whole. Leaves out a
    limit on gathers issued ahead.
    """
    streams = _Streams()
    gathered: list[float] = []
    for layer in layers:
        streams = streams.communicate(gather_seconds(layer.parameter_bytes))
        gathered.append(streams.communication_end_seconds)
    for layer, end_seconds in zip(layers, gathered, strict=True):
        streams = streams.waiting_until(end_seconds).compute(layer.forward_seconds, slowdown)
    return streams.joined().result()


class _Streams(NamedTuple):
    """The times that the two streams have reached, and the sums of their work.

    A tuple, because one is created for every layer of every priced stage.
    """

    compute_end_seconds: float = 0.0
    communication_end_seconds: float = 0.0
    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    slowdown_seconds: float = 0.0

    def communicate(self, seconds: float) -> "_Streams":
        """Issue a collective at the time that computing has reached."""
        compute_end, end, computed, communicated, slowed = self
        start = max(compute_end, end)
        return _Streams(compute_end, start + seconds, computed, communicated + seconds, slowed)

    def compute(self, seconds: float, slowdown: float) -> "_Streams":
        """Compute; slower while issued collectives run."""
        compute_end, end, computed, communicated, slowed = self
        beside = max(0.0, end - compute_end)
        more = min(seconds * slowdown, beside * slowdown / (1 + slowdown))
        compute_end += seconds + more
        return _Streams(compute_end, end, computed + seconds, communicated, slowed + more)

    def waiting_until(self, end_seconds: float) -> "_Streams":
        """Compute nothing before this time."""
        return _Streams(max(self.compute_end_seconds, end_seconds), *self[1:])

    def joined(self) -> "_Streams":
        """Compute nothing before all collectives have ended."""
        return self.waiting_until(self.communication_end_seconds)

    def result(self) -> Overlapped:
        """Return the seconds of both streams, after they have joined."""
        exposed = self.compute_end_seconds - self.compute_seconds - self.slowdown_seconds
        return Overlapped(
            compute_seconds=self.compute_seconds,
            communication_seconds=self.communication_seconds,
            slowdown_seconds=self.slowdown_seconds,
            exposed_seconds=max(0.0, exposed),  # sums differ in their last digits
        )
