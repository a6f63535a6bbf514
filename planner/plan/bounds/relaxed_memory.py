"""Bounds from below the time that recomputation costs, before layers are laid on stages.

Rank r holds the saved tensors of K_r microbatches and the state of its layers within M bytes, so

    Σ_r A_r  ≤  Σ_r (M − S_r) / K_r  ≤  Σ_r M / K_r  −  S / max K        A: saved bytes, S: state

Whatever the stages, the layers together must save no more than that. The cheapest way to get there
takes layers' recomputation by its price per byte, the last one in part (a fractional knapsack).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.schedules.pipeline import rank_of
from autopar.planner.costs.schedules.table import (
    PipelineShape,
    ScheduleKind,
    in_flight_microbatches,
)
from autopar.planner.costs.steps.step import pipeline_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Bytes that recomputing saves, and the seconds that it costs."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What a microbatch saves at most, what recomputing saves of that, the cheapest first.

    `transient_bytes` is what some layer needs at least while it runs, beside what is kept;
    `last_transient_bytes` is what the last layer needs, before which nothing is freed.
    """

    saved_bytes: int
    savings: tuple[Saving, ...]
    transient_bytes: int
    last_transient_bytes: int


def ladder(rows: Sequence[Modes]) -> Ladder:
    """Return the ladder of a row of layers."""
    saved, transient, last, savings = 0, 0, 0, []
    for _, group in groupby(rows, key=id):
        alike = list(group)
        modes = alike[0]
        saved += len(alike) * modes[Recompute.NONE].saved_bytes
        last = min(c.transient_bytes for c in modes.values())
        transient = max(transient, last)
        savings += [
            Saving(size_bytes=len(alike) * one.size_bytes, seconds=len(alike) * one.seconds)
            for one in _hull(modes)
        ]
    cheapest = sorted(savings, key=lambda one: one.seconds / one.size_bytes)
    return Ladder(
        saved_bytes=saved,
        savings=tuple(cheapest),
        transient_bytes=transient,
        last_transient_bytes=last,
    )


def lightest(rows: Sequence[Sequence[Modes]]) -> tuple[Modes, ...]:
    """Return each layer at its least on any kind of device; equal layers stay one object."""
    if len(rows) == 1:
        return tuple(rows[0])
    known: dict[tuple[int, ...], Modes] = {}
    least = []
    for alternatives in zip(*rows, strict=True):
        key = tuple(map(id, alternatives))
        if key not in known:
            known[key] = {mode: _lightest(mode, alternatives) for mode in Recompute}
        least.append(known[key])
    return tuple(least)


def _lightest(mode: Recompute, alternatives: Sequence[Modes]) -> LayerCost:
    plain = [modes[Recompute.NONE].backward_seconds for modes in alternatives]
    own = [modes[mode] for modes in alternatives]
    again = min(one.backward_seconds - base for one, base in zip(own, plain, strict=True))
    backward = min(plain) + max(0.0, again)
    inputs = min(one.backward_seconds - one.weight_gradient_seconds for one in own)
    return replace(
        own[0],
        forward_seconds=min(one.forward_seconds for one in own),
        backward_seconds=backward,
        weight_gradient_seconds=max(0.0, backward - inputs),
        saved_bytes=min(one.saved_bytes for one in own),
        transient_bytes=min(one.transient_bytes for one in own),
    )


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
    arrangement: Arrangement, *, rank_bytes: float, state_bytes: float
) -> float:
    """Return what one microbatch may save over all layers (the equation above)."""
    in_flight = in_flight_by_rank(arrangement)
    return sum(rank_bytes / count for count in in_flight) - state_bytes / max(in_flight)


def in_flight_by_rank(arrangement: Arrangement) -> tuple[int, ...]:
    """Return the least in-flight microbatches among the stages of each rank."""
    if arrangement.pipeline == 1:
        return (1,)
    return _in_flight_by_rank(arrangement.schedule, pipeline_shape(arrangement))


@lru_cache(maxsize=4096)
def _in_flight_by_rank(schedule: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    least: dict[int, int] = {}
    for stage in range(shape.stages):
        rank = rank_of(schedule, stage, shape.ranks)
        count = in_flight_microbatches(schedule, stage, shape)
        least[rank] = min(count, least.get(rank, count))
    return tuple(least.values())
