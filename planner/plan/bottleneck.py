"""Bounds from below the time of a pipeline's slowest rank for one microbatch, before any cut.

Layers are not divisible: of n equal ones some rank has ⌈n ÷ p⌉, and one rank has the head beside
its own. A rank with K microbatches in flight holds at most, within T seconds and M bytes,

    N_K(T)  =  ⌊ max { Σ x : Σ t·x ≤ T,  Σ (state + K · saved)·x ≤ M,  x ≥ 0 by recompute mode } ⌋

of the layers that repeat most. With o the seconds of any other layer, and O those of all others,
the slowest rank takes at least the least T at which they all find a place:

    Σ_r N_r(T)  −  min_r { N_r(T) − N_r(T − o) }            ≥  n        one rank holds that layer too
    p · ⌊T ÷ t⌋  −  ⌈(O − p · (T − t · ⌊T ÷ t⌋)) ÷ t⌉  ≥  n        what does not fill the gaps, t: least
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.prediction import LayerCost, Recompute

Modes = Mapping[Recompute, LayerCost]
Floats = npt.NDArray[np.float64]
_HALVINGS = 18  # of the interval in which the bottleneck lies: to a few millionths of it
_ROUNDING = 1e-6  # of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a layer: its seconds and what it saves, both for one microbatch."""

    forward_seconds: float
    backward_seconds: float
    saved_bytes: float

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The layers that repeat most, and the least seconds of each of the others.

    The first mode computes nothing again.
    """

    count: int
    others: tuple[float, ...]
    modes: tuple[Mode, ...]
    parameter_bytes: int  # of one of them
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the ranks of a pipeline may hold: bytes, for so many microbatches on each rank."""

    in_flight: tuple[int, ...]
    rank_bytes: float
    state_bytes: float  # of one of the layers that repeat
    margin: float


def block(rows: Sequence[Modes]) -> Block:
    """Return the most frequent of a row of layers, with the others."""
    numbers: dict[int, int] = {}
    for modes in rows:
        numbers[id(modes)] = numbers.get(id(modes), 0) + 1
    most = max(rows, key=lambda modes: numbers[id(modes)])
    plain = most[Recompute.NONE]
    return Block(
        count=numbers[id(most)],
        others=tuple(_least_seconds(modes) for modes in rows if modes is not most),
        modes=tuple(
            Mode(
                forward_seconds=one.forward_seconds,
                backward_seconds=one.backward_seconds,
                saved_bytes=float(one.saved_bytes),
            )
            for one in most.values()
        ),
        parameter_bytes=plain.parameter_bytes,
        gradient_bytes=plain.gradient_bytes,
    )


def _least_seconds(modes: Modes) -> float:
    return min(one.forward_seconds + one.backward_seconds for one in modes.values())


def free_bottleneck_seconds(
    count: int, seconds: float, others: Sequence[float], *, ranks: int
) -> float:
    """Return the least time of the slowest rank where memory plays no part."""

    def layers_within(most: float) -> Floats:
        return np.full(ranks, most / seconds if seconds else float(count))

    return _least_time(layers_within, count, seconds, others, ranks=ranks, high=None)


def least_bottleneck_seconds(repeated: Block, room: Room) -> float:
    """Return the least time of the slowest rank within the memory; infinite where none fits."""
    ranks = len(room.in_flight)
    fastest = min(mode.seconds for mode in repeated.modes)
    free = free_bottleneck_seconds(repeated.count, fastest, repeated.others, ranks=ranks)
    in_flight = np.array(room.in_flight, dtype=np.float64)
    options = [
        (
            mode.seconds,
            np.maximum(1.0, room.state_bytes + in_flight * mode.saved_bytes * (1.0 + room.margin)),
        )
        for mode in repeated.modes
    ]

    def layers_within(most: float) -> Floats:
        return _most_layers(options, most, room.rank_bytes)

    slowest = max(mode.seconds for mode in repeated.modes) * repeated.count
    high = slowest + sum(repeated.others)
    if _placed(layers_within, free, repeated.others) >= repeated.count:
        return free
    if _placed(layers_within, high, repeated.others) < repeated.count:
        return float("inf")
    return max(
        free,
        _least_time(
            layers_within, repeated.count, fastest, repeated.others, ranks=ranks, high=high
        ),
    )


def _least_time(
    layers_within: Callable[[float], Floats],
    count: int,
    seconds: float,
    others: Sequence[float],
    *,
    ranks: int,
    high: float | None,
) -> float:
    """Return the least time, less a few millionths, at which all layers find a place."""
    together = sum(others)
    low = (count * seconds + together) / ranks
    top = count * seconds + together if high is None else high
    for _ in range(_HALVINGS):
        middle = (low + top) / 2
        is_enough = (
            _placed(layers_within, middle, others) >= count
            and _placed_beside(middle, seconds, together, ranks) >= count
        )
        low, top = (low, middle) if is_enough else (middle, top)
    return low


def _placed(layers_within: Callable[[float], Floats], most: float, others: Sequence[float]) -> int:
    """Return how many of the repeated layers have a place beside the longest of the others."""
    own = np.floor(layers_within(most) + _ROUNDING)
    longest = max(others, default=0.0)
    if longest > most * (1.0 + _ROUNDING):
        return -1
    left = np.floor(layers_within(max(0.0, most - longest)) + _ROUNDING)
    return int(own.sum() - (own - left).min())


def _placed_beside(most: float, seconds: float, together: float, ranks: int) -> float:
    """Return how many of the repeated layers have a place beside all of the others."""
    if not seconds:
        return math.inf
    each = math.floor(most / seconds + _ROUNDING)
    gaps = ranks * max(0.0, most - each * seconds)
    return ranks * each - math.ceil(max(0.0, together - gaps) / seconds - _ROUNDING)


def _most_layers(
    options: Sequence[tuple[float, Floats]], seconds: float, size_bytes: float
) -> Floats:
    """Return by rank max Σ x with Σ t·x ≤ seconds, Σ b·x ≤ bytes: of one mode, or a mix of two."""
    most = np.zeros_like(options[0][1])
    for t, b in options:
        within = size_bytes / b
        np.maximum(most, np.minimum(seconds / t, within) if t else within, out=most)
    for (t1, b1), (t2, b2) in combinations(options, 2):
        determinant = t1 * b2 - t2 * b1
        with np.errstate(divide="ignore", invalid="ignore"):
            x1 = (seconds * b2 - size_bytes * t2) / determinant
            x2 = (t1 * size_bytes - b1 * seconds) / determinant
        is_mix = (determinant != 0) & (x1 >= 0) & (x2 >= 0)
        most = np.where(is_mix, np.maximum(most, x1 + x2), most)
    return most
