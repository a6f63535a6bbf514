"""Chooses the stages: prices intervals, narrows them by bounds, and lets the program decide.

The answer is a plan with the bound that proves it, or why there is none: no plan exists, none is
better than the caller's cutoff, or the time limit came first (a plan with a gap).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.programs.solver import NOTHING_SOLVED, SolverName, SolverReport
from autopar.planner.programs.stages.bounds import Weights, objective_ticks
from autopar.planner.programs.stages.intervals import Interval, IntervalTable, StagePricing
from autopar.planner.programs.stages.memory import memory_shortfall_bytes
from autopar.planner.programs.stages.problem import LayerChoices, StageLimits
from autopar.planner.programs.stages.program import decide
from autopar.planner.programs.stages.search import Narrowed, narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """Layers `first` up to, not including, `stop`, and the name of the option that each uses.

    Options that keep more in memory come first among equal layers.
    """

    first: int
    stop: int
    seconds: float  # forward, backward and cuts, per microbatch
    step_seconds: float
    resident_bytes: int
    transient_bytes: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The best plan found, and what no plan can beat."""

    stages: tuple[PlannedStage, ...]
    objective_seconds: float
    bound_seconds: float
    report: SolverReport

    @property
    def gap(self) -> float:
        """How much worse than the bound the plan may be, as a fraction; 0 when it is proved."""
        if self.bound_seconds >= self.objective_seconds:
            return 0.0
        return (self.objective_seconds - self.bound_seconds) / self.objective_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingBetter:
    """No plan is below the cutoff; the bound is at least the cutoff."""

    bound_seconds: float
    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """The time limit came before any plan below the cutoff, or the proof that there is none."""

    bound_seconds: float
    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStages:
    """No plan exists.

    With so many bytes more on every stage there would be one; None: no memory helps, for pins,
    forbidden cuts and the number of stages contradict each other.
    """

    shortfall_bytes: int | None


StageAnswer = StagePlan | NothingBetter | Undecided | NoStages


def choose_stages(
    choices: LayerChoices,
    limits: StageLimits,
    *,
    cutoff_seconds: float = math.inf,
    time_limit_seconds: float = 60.0,
    solver: SolverName | None = None,
) -> StageAnswer:
    """Return the plan of least step time below the cutoff, proved, or why there is none."""
    deadline = time.perf_counter() + time_limit_seconds
    pricing = StagePricing(choices, limits)
    ticks_per_objective = pricing.ticks_per_second * limits.stages_per_rank
    found = _narrowed(pricing, cutoff=cutoff_seconds * ticks_per_objective)
    if found is None:
        return NoStages(shortfall_bytes=memory_shortfall_bytes(choices, limits))
    table, state = found
    report = NOTHING_SOLVED
    if not state.is_decided:
        left = max(0.1, deadline - time.perf_counter())
        state, report = _decided(state, table, limits, time_limit_seconds=left, solver=solver)
    bound = state.bound / ticks_per_objective
    if not state.plan:
        kind = NothingBetter if state.is_decided else Undecided
        return kind(bound_seconds=bound, report=report)
    return _told(pricing, state, report)


def _narrowed(pricing: StagePricing, *, cutoff: float) -> tuple[IntervalTable, Narrowed] | None:
    """Return the table of intervals that are short enough to matter, and what is left to decide.

    Intervals up to a third above the mean come first. The plan found says how long others may be,
    and is the one to beat among those; where there is none, and memory is not the reason, the
    length is doubled.
    """
    count, stages = len(pricing.choices.layers), len(pricing.limits.stages)
    most = pricing.longest_that_matters(math.inf)
    longest = min(most, 1 + -(-4 * count // (3 * stages)))
    plan: tuple[Interval, ...] = ()
    while True:
        table = pricing.table(longest)
        state = narrow(table, pricing.limits, cutoff=cutoff, plan=plan)
        if state is not None:
            cutoff, plan = state.objective, state.plan
            needed = pricing.longest_that_matters(state.objective)
            if needed <= longest:
                return table, state
        elif longest == most or not _has_plan(pricing):
            return None
        else:
            needed = min(most, 2 * longest)
        longest = needed


def _has_plan(pricing: StagePricing) -> bool:
    shortfall = memory_shortfall_bytes(pricing.choices, pricing.limits)
    return shortfall is not None and shortfall <= 0


def _decided(
    state: Narrowed,
    table: IntervalTable,
    limits: StageLimits,
    *,
    time_limit_seconds: float,
    solver: SolverName | None,
) -> tuple[Narrowed, SolverReport]:
    """Let the program choose among the open intervals; close them all if it proves its choice."""
    open_ones = [
        Interval(mix=k, stage=p, first=i, stop=i + length + 1)
        for k, p, i, length in np.argwhere(state.is_open).tolist()
    ]
    decision = decide(
        open_ones, table, limits, time_limit_seconds=time_limit_seconds, solver=solver
    )
    if decision.plan:
        objective = float(objective_ticks(decision.plan, table, limits))
        if objective < state.objective:
            state = replace(state, plan=decision.plan, objective=objective)
    if decision.is_proved:
        closed = np.zeros_like(state.is_open)
        return replace(state, is_open=closed, bound=state.objective), decision.report
    bound = max(state.bound, min(state.objective, decision.bound or 0.0))
    return replace(state, bound=bound), decision.report


def _told(pricing: StagePricing, state: Narrowed, report: SolverReport) -> StagePlan:
    """Return the plan in seconds and names, with the objective summed anew from its options."""
    stages = tuple(_planned(pricing, interval) for interval in state.plan)
    objective = step_seconds(stages, pricing.limits)
    bound = objective * min(1.0, state.bound / state.objective) if state.objective else objective
    return StagePlan(stages=stages, objective_seconds=objective, bound_seconds=bound, report=report)


def step_seconds(stages: Sequence[PlannedStage], limits: StageLimits) -> float:
    """Return the objective: ((m·v − 1) · Σ T + Σ F) / v + Σ U."""
    turns, ranks = limits.stages_per_rank, limits.ranks
    rounds = [stages[turn * ranks : (turn + 1) * ranks] for turn in range(turns)]
    slowest = sum(max(stage.seconds for stage in one) for one in rounds)
    once = sum(max(stage.step_seconds for stage in one) for one in rounds)
    total = math.fsum(stage.seconds for stage in stages)
    return (Weights.of(limits).bottleneck * slowest + total) / turns + once


def _planned(pricing: StagePricing, interval: Interval) -> PlannedStage:
    """Return a stage with the options of its layers, those that keep more in memory first."""
    choices, limit = pricing.choices, pricing.limits.stages[interval.stage]
    groups = choices.options[limit.device_class]
    queues = {}
    for number, uses in enumerate(pricing.uses(interval)):
        pairs = zip(groups[number], uses, strict=True)
        used = [option for option, use in pairs for _ in range(use)]
        used.sort(key=lambda option: -limit.resident_bytes(option))
        queues[number] = iter(used)
    options = [next(queues[c]) for c in choices.layers[interval.first : interval.stop]]
    return PlannedStage(
        first=interval.first,
        stop=interval.stop,
        seconds=math.fsum([*(o.seconds for o in options), *_cut_seconds(pricing, interval)]),
        step_seconds=math.fsum(option.step_seconds for option in options),
        resident_bytes=sum(map(limit.resident_bytes, options)),
        transient_bytes=max(option.transient_bytes for option in options),
        options=tuple(option.name for option in options),
    )


def _cut_seconds(pricing: StagePricing, interval: Interval) -> tuple[float, float]:
    begin, end = pricing.cut_scales(interval.stage)
    boundaries = pricing.choices.boundaries
    return (
        boundaries[interval.first].beginning_seconds * begin,
        boundaries[interval.stop].ending_seconds * end,
    )
