"""Lower bounds of the slowest rank's time for one microbatch, over all cuts into stages.

Layers are not divided: of n equal layers on p ranks, some rank has ⌈n ÷ p⌉ or more, and one rank
also has the head. The largest set of equal layers is called the repeated layers. Within T seconds
and M bytes, with K microbatches in flight, a rank holds at most this many of them:

    N(T)  =  ⌊ max { Σ x : Σ t·x ≤ T,  Σ (state + K · saved)·x ≤ M,  x ≥ 0 by recompute mode } ⌋

M excludes the memory that a layer needs only while it runs. If a rank has several stages, each has
its own x, K and share of M. Let o be the seconds of the longest other layer, O those of all other
layers, and t the least seconds of a repeated layer. All layers fit within T only if one rank has
room for the longest other layer, and all ranks together for all other layers:

    Σ_r N_r(T)  −  min_r { N_r(T) − N_r(T − o) }        ≥  n
    p · ⌊T ÷ t⌋  −  ⌈(O − p · (T − t · ⌊T ÷ t⌋)) ÷ t⌉  ≥  n
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.planner.costs.prediction import Modes, Recompute

_HALVINGS = 18  # bisections of the bottleneck's interval: to a few millionths of it
_ROUNDING = 1e-6  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A recompute mode of a layer: its seconds and saved bytes for one microbatch."""

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float  # the part of the backward that a split backward defers
    saved_bytes: float
    transient_bytes: float  # in addition, while it runs

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBlock:
    """The repeated layers, and the least seconds of each other layer.

    The first mode is without recomputation.
    """

    count: int
    others: tuple[float, ...]
    modes: tuple[Mode, ...]
    parameter_bytes: int  # of one layer
    gradient_bytes: int
    trainable_tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """The memory of a stage for repeated layers, and its microbatches in flight."""

    in_flight: int
    size_bytes: float
    reserved_bytes: float = 0.0  # part of it that a layer needs while it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRoom:
    """The memory of each rank of a pipeline, by stage."""

    ranks: tuple[tuple[StageRoom, ...], ...]
    state_bytes: float  # of one repeated layer
    unsharded_bytes: float  # of one repeated layer, while it runs
    transient_bytes: float  # at least this much in every stage
    margin: float
    is_one_pass: bool = False  # a step has a single backward (see `_pieces`)


def block(rows: Sequence[Modes]) -> LayerBlock:
    """Return the layer that repeats most in a sequence of layers, and the others."""
    numbers: dict[int, int] = {}
    for modes in rows:
        numbers[id(modes)] = numbers.get(id(modes), 0) + 1
    most = max(rows, key=lambda modes: numbers[id(modes)])
    plain = most[Recompute.NONE]
    return LayerBlock(
        count=numbers[id(most)],
        others=tuple(least_layer_seconds(modes) for modes in rows if modes is not most),
        modes=tuple(
            Mode(
                forward_seconds=one.forward_seconds,
                backward_seconds=one.backward_seconds,
                weight_gradient_seconds=one.weight_gradient_seconds,
                saved_bytes=float(one.saved_bytes),
                transient_bytes=float(one.transient_bytes),
            )
            for one in most.values()
        ),
        parameter_bytes=plain.parameter_bytes,
        gradient_bytes=plain.gradient_bytes,
        trainable_tensors=plain.trainable_tensors,
    )


def least_layer_seconds(modes: Modes) -> float:
    """Return the least time of a layer over its modes."""
    return min(one.forward_seconds + one.backward_seconds for one in modes.values())


def free_bottleneck_seconds(
    count: int, seconds: float, others: Sequence[float], *, ranks: int
) -> float:
    """Return the least time of the slowest rank, without memory limits."""
    if not seconds:
        return max(0.0, *others, sum(others) / ranks)
    endless = _Curve(times=(0.0, count * seconds), layers=(0.0, float(count)))
    top = count * seconds + sum(others)
    return _least_time([(endless, ranks)], count, seconds, others, top=top)


def least_bottleneck_seconds(repeated: LayerBlock, room: PipelineRoom) -> float:
    """Return the least time of the slowest rank within the memory; infinite if nothing fits."""
    ranks = len(room.ranks)
    fastest = min(mode.seconds for mode in repeated.modes)
    free = free_bottleneck_seconds(repeated.count, fastest, repeated.others, ranks=ranks)
    curves = [
        (_curve(repeated.modes, rooms, room), number)
        for rooms, number in Counter(room.ranks).items()
    ]
    if _placed(curves, free, repeated.others) >= repeated.count:
        return free
    top = max(curve.times[-1] for curve, _ in curves) + sum(repeated.others)
    if _placed(curves, top, repeated.others) < repeated.count:
        return float("inf")
    return max(free, _least_time(curves, repeated.count, fastest, repeated.others, top=top))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """The most layers of a rank as a function of time: corners of a concave curve."""

    times: tuple[float, ...]
    layers: tuple[float, ...]

    def whole(self, seconds: float) -> int:
        """Return how many whole layers fit into this time at most."""
        place = bisect_right(self.times, seconds)
        if place == len(self.times):
            return math.floor(self.layers[-1] + _ROUNDING)
        t0, t1 = self.times[place - 1], self.times[place]
        n0, n1 = self.layers[place - 1], self.layers[place]
        return math.floor(n0 + (n1 - n0) * (seconds - t0) / (t1 - t0) + _ROUNDING)


_Curves = Sequence[tuple[_Curve, int]]  # each with its number of ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCapacities:
    """How many repeated layers each rank can hold at most, as a function of time."""

    ranks: tuple[_Curve, ...]

    def least(self, weights: Sequence[float], layers: float, *, within_seconds: float) -> float:
        """Return the least Σ weight · layers, over all ways to share layers among the ranks.

        The weights of the ranks ascend.
        """
        total = 0.0
        for weight, curve in zip(weights, self.ranks, strict=True):
            here = min(layers, curve.whole(within_seconds))
            total += weight * here
            layers -= here
        return total


def rank_capacities(repeated: LayerBlock, room: PipelineRoom) -> RankCapacities:
    """Return how many layers the pipeline's ranks can hold within the memory."""
    known = {rooms: _curve(repeated.modes, rooms, room) for rooms in dict.fromkeys(room.ranks)}
    return RankCapacities(ranks=tuple(known[rooms] for rooms in room.ranks))


def _curve(modes: Sequence[Mode], rooms: Sequence[StageRoom], room: PipelineRoom) -> _Curve:
    """Return a rank's curve: the pieces of its stages, most layers per second first."""
    pieces = [piece for one in rooms for piece in _pieces(modes, one, room)]
    times, layers = [0.0], [0.0]
    for seconds, number in sorted(pieces, key=lambda piece: piece[0] / piece[1]):
        times.append(times[-1] + seconds)
        layers.append(layers[-1] + number)
    return _Curve(times=tuple(times), layers=tuple(layers))


def _pieces(
    modes: Sequence[Mode], stage: StageRoom, room: PipelineRoom
) -> Iterator[tuple[float, float]]:
    """Yield seconds and layers of each piece of a stage's curve, from corner to corner.

    At a corner, layers of one mode fill the memory. A mix of modes divides the memory, so it lies
    below the hull of the single modes. If a step has one backward, only the model's last layer runs
    while everything is saved; its mode is not known, so the least need of any mode counts.
    """
    corners = []
    size, reserved = (one / (1.0 + room.margin) for one in (stage.size_bytes, stage.reserved_bytes))
    least = min(mode.transient_bytes for mode in modes)
    for mode in modes:
        own = least if room.is_one_pass else mode.transient_bytes
        left = size - max(reserved, own + room.unsharded_bytes, room.transient_bytes)
        each = room.state_bytes + stage.in_flight * mode.saved_bytes
        number = max(0.0, left) / max(1.0, each)
        corners.append((number * mode.seconds, number))
    here = (0.0, 0.0)
    while True:
        above = [corner for corner in corners if corner[1] > here[1] * (1.0 + _ROUNDING)]
        if not above:
            return
        best = min(above, key=lambda to: (to[0] - here[0]) / (to[1] - here[1]))
        yield max(0.0, best[0] - here[0]), best[1] - here[1]
        here = best


def _least_time(
    curves: _Curves, count: int, seconds: float, others: Sequence[float], *, top: float
) -> float:
    """Return the least time, minus a few millionths, within which all layers fit."""
    ranks, together = sum(number for _, number in curves), sum(others)
    low = (count * seconds + together) / ranks
    top = max(low, top)
    for _ in range(_HALVINGS):
        middle = (low + top) / 2
        is_enough = (
            _placed(curves, middle, others) >= count
            and _placed_beside(middle, seconds, together, ranks) >= count
        )
        low, top = (low, middle) if is_enough else (middle, top)
    return low


def _placed(curves: _Curves, most: float, others: Sequence[float]) -> int:
    """Return how many repeated layers fit if one rank also has the longest other layer."""
    longest = max(others, default=0.0)
    if longest > most * (1.0 + _ROUNDING):
        return -1
    left = max(0.0, most - longest)
    whole = [(curve.whole(most), curve.whole(left), number) for curve, number in curves]
    lost = min(own - beside for own, beside, _ in whole)
    return sum(own * number for own, _, number in whole) - lost


def _placed_beside(most: float, seconds: float, together: float, ranks: int) -> float:
    """Return how many repeated layers fit if the other layers fill the time that these leave."""
    if not seconds:
        return math.inf
    each = math.floor(most / seconds + _ROUNDING)
    gaps = ranks * max(0.0, most - each * seconds)
    return ranks * each - math.ceil(max(0.0, together - gaps) / seconds - _ROUNDING)
