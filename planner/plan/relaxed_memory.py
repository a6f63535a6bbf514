"""Bounds from below the time that recomputation costs, before layers are laid on stages.

Rank r holds the saved tensors of K_r microbatches and the state of its layers within M bytes, so

    Σ_r A_r  ≤  Σ_r (M − S_r) / K_r  ≤  Σ_r M / K_r  −  S / max K        A: saved bytes, S: state

Whatever the stages, the layers together must save no more than that. The cheapest way to get there
takes layers' recomputation by its price per byte, the last one in part (a fractional knapsack).

Ranks that hold more microbatches recompute more, so they can take fewer layers: for the layers that
repeat most, n of them, the slowest rank takes T where the most layers that fit add up to n,

    Σ_r max { Σ x : Σ t·x ≤ T,  Σ (state + K_r · saved)·x ≤ M,  x ≥ 0 by recompute mode }  =  n
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from autopar.planner.costs.pipeline import rank_of
from autopar.planner.costs.prediction import Arrangement, LayerCost, Recompute
from autopar.planner.costs.schedule import in_flight_microbatches
from autopar.planner.costs.step import pipeline_shape

Modes = Mapping[Recompute, LayerCost]
_HALVINGS = 30  # of the interval in which the bottleneck lies: to a billionth of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Bytes that recomputing saves, and the seconds that it costs."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What a microbatch saves at most, what recomputing saves of that, the cheapest first.

    `least_alone_bytes` is what some layer needs at least while it runs.
    """

    saved_bytes: int
    savings: tuple[Saving, ...]
    least_alone_bytes: int


def ladder(rows: Sequence[Modes]) -> Ladder:
    """Return the ladder of a row of layers."""
    saved, alone, savings = 0, 0, []
    for _, group in groupby(rows, key=id):
        alike = list(group)
        modes = alike[0]
        saved += len(alike) * modes[Recompute.NONE].saved_bytes
        alone = max(alone, min(c.saved_bytes + c.transient_bytes for c in modes.values()))
        savings += [
            Saving(size_bytes=len(alike) * one.size_bytes, seconds=len(alike) * one.seconds)
            for one in _hull(modes)
        ]
    cheapest = sorted(savings, key=lambda one: one.seconds / one.size_bytes)
    return Ladder(saved_bytes=saved, savings=tuple(cheapest), least_alone_bytes=alone)


def _hull(modes: Modes) -> Iterator[Saving]:
    """Yield the steps from keeping all to keeping least, along the lower hull of time and bytes."""
    here = modes[Recompute.NONE]
    others = [modes[Recompute.SELECTIVE], modes[Recompute.FULL]]
    while True:
        lower = [cost for cost in others if cost.saved_bytes < here.saved_bytes]
        if not lower:
            return
        best = min(
            lower,
            key=lambda cost: (
                (cost.backward_seconds - here.backward_seconds)
                / (here.saved_bytes - cost.saved_bytes)
            ),
        )
        seconds = max(0.0, best.backward_seconds - here.backward_seconds)
        yield Saving(size_bytes=here.saved_bytes - best.saved_bytes, seconds=seconds)
        here = best


def least_recompute_seconds(steps: Ladder, budget_bytes: float) -> float:
    """Return the least time that recomputing takes to meet a budget; infinite where it cannot."""
    over = steps.saved_bytes - budget_bytes
    total = 0.0
    for saving in steps.savings:
        if over <= 0:
            return total
        share = min(1.0, over / saving.size_bytes)
        total += share * saving.seconds
        over -= share * saving.size_bytes
    return total if over <= 0 else float("inf")


def activation_budget_bytes(
    arrangement: Arrangement, *, rank_bytes: int, state_bytes: float, margin: float
) -> float:
    """Return what one microbatch may save over all layers (the equation above)."""
    in_flight = _in_flight_by_rank(arrangement)
    total = sum(rank_bytes / count for count in in_flight) - state_bytes / max(in_flight)
    return total / (1.0 + margin)


def _in_flight_by_rank(arrangement: Arrangement) -> list[int]:
    """Return the least in-flight microbatches among the stages of each rank."""
    if arrangement.pipeline == 1:
        return [1]
    shape = pipeline_shape(arrangement)
    least: dict[int, int] = {}
    for stage in range(shape.stages):
        rank = rank_of(arrangement.schedule, stage, arrangement.pipeline)
        count = in_flight_microbatches(arrangement.schedule, stage, shape)
        least[rank] = min(count, least.get(rank, count))
    return list(least.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The layers that repeat most: how many there are, and each mode's time and saved bytes.

    `others` is how many layers are not among them, the seconds are without recomputing.
    """

    count: int
    others: int
    forward_seconds: float
    backward_seconds: float
    modes: tuple[tuple[float, float], ...]


def block(rows: Sequence[Modes]) -> Block:
    """Return the most frequent of a row of layers."""
    number = Counter(map(id, rows))
    most = max(rows, key=lambda modes: number[id(modes)])
    return Block(
        count=number[id(most)],
        others=len(rows) - number[id(most)],
        forward_seconds=most[Recompute.NONE].forward_seconds,
        backward_seconds=most[Recompute.NONE].backward_seconds,
        modes=tuple(
            (one.forward_seconds + one.backward_seconds, float(one.saved_bytes))
            for one in most.values()
        ),
    )


def least_bottleneck_seconds(
    repeated: Block, arrangement: Arrangement, *, rank_bytes: int, state_bytes: float, margin: float
) -> float:
    """Return the least time that the slowest rank takes for one microbatch of these layers alone.

    `state_bytes` is of one of them. Infinite where they do not fit at all.
    """
    ranks = Counter(_in_flight_by_rank(arrangement))
    options = {
        in_flight: [
            (seconds, max(1.0, state_bytes + in_flight * saved * (1.0 + margin)))
            for seconds, saved in repeated.modes
        ]
        for in_flight in ranks
    }

    def layers_within(seconds: float) -> float:
        return sum(
            number * _most_layers(options[in_flight], seconds, rank_bytes)
            for in_flight, number in ranks.items()
        )

    slowest = max(seconds for seconds, _ in repeated.modes) * repeated.count
    if layers_within(slowest) < repeated.count:
        return float("inf")
    low, high = 0.0, slowest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if layers_within(middle) >= repeated.count else (middle, high)
    return low


def _most_layers(
    options: Sequence[tuple[float, float]], seconds: float, size_bytes: float
) -> float:
    """Return max Σ x with Σ t·x ≤ seconds and Σ b·x ≤ bytes: one mode, or a mix of two."""
    most = max(min(seconds / t, size_bytes / b) for t, b in options)
    for (t1, b1), (t2, b2) in combinations(options, 2):
        determinant = t1 * b2 - t2 * b1
        if determinant:
            x1 = (seconds * b2 - size_bytes * t2) / determinant
            x2 = (t1 * size_bytes - b1 * seconds) / determinant
            if x1 >= 0 and x2 >= 0:
                most = max(most, x1 + x2)
    return most
