"""Narrows the intervals to those that a better plan could use, around the best plan known so far.

Least sums and least maxima over paths bound the objective from below. The path of least sum among
the intervals up to the least bottleneck is a plan, and bounds it from above.

An interval stays only if the bounds, with this interval in the plan, are below the best plan by
more than rounding. What stays gives tighter bounds, until little more leaves. Where no path is
left, the best plan is proved; where one is, the integer program decides.
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.bounds import (
    Paths,
    least_sum,
    objective_ticks,
    walk,
)
from autopar.planner.programs.stages.intervals import Interval, IntervalTable
from autopar.planner.programs.stages.options import NEVER, Ticks
from autopar.planner.programs.stages.problem import StageLimits
from autopar.planner.programs.stages.rounds import Rounds, bound_rounds

_BETTER = 1.0 - 1e-9  # of the best plan: what is not below this is no better
_BANDS = (1, 4, 32, 32, 32, 32)  # of T, sweep by sweep: finer where coarser bounds did not do
_SLACKS = (0.0, 1 / 32, 1 / 8, 1.0)  # on the bottlenecks of the bound, tried for a plan

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Narrowed:
    """The best plan known, what no plan can beat, and the intervals that a better plan could use.

    `is_open` is [mix, stage, first, length − 1].
    """

    plan: tuple[Interval, ...]  # empty: none is below the cutoff
    objective: float
    bound: float
    is_open: Mask

    @property
    def is_decided(self) -> bool:
        """Whether nothing better can exist."""
        return not self.is_open.any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Floors:
    """What the open intervals cannot beat."""

    sums: Paths
    rounds: Rounds


def narrow(
    table: IntervalTable, limits: StageLimits, *, cutoff: float, plan: tuple[Interval, ...] = ()
) -> Narrowed | None:
    """Return what is left to decide below the cutoff, or None where the table has no plan.

    A plan that is known already is the one to beat; the cutoff is its objective then.
    """
    state = Narrowed(plan=plan, objective=cutoff, bound=0.0, is_open=table.ticks < NEVER)
    for sweep in range(len(_BANDS)):
        floors = _floors(table, limits, state, bands=_BANDS[sweep])
        if floors is None and sweep == 0:
            return None
        if floors is None:
            closed = np.zeros_like(state.is_open)
            return replace(state, is_open=closed, bound=state.objective)
        opened = int(state.is_open.sum())
        state = _with_better_plan(state, table, limits, floors)
        state = _swept(state, table, limits, floors)
        if _BANDS[sweep] == _BANDS[-1] and int(state.is_open.sum()) > 0.9 * opened:
            break
    return state


def _floors(
    table: IntervalTable, limits: StageLimits, state: Narrowed, *, bands: int
) -> _Floors | None:
    costs = np.where(state.is_open, table.ticks, NEVER).min(axis=0)
    sums = least_sum(costs)
    if sums.least >= NEVER:
        return None
    steps = np.where(state.is_open, table.steps, NEVER).min(axis=0)
    aim = state.objective * _BETTER
    return _Floors(sums=sums, rounds=bound_rounds(costs, steps, limits, bands=bands, aim=aim))


def _with_better_plan(
    state: Narrowed, table: IntervalTable, limits: StageLimits, floors: _Floors
) -> Narrowed:
    """Try paths of least sum: among all open intervals, and within the rounds of the bound.

    In the latter, intervals are kept close to the bottlenecks of the bound, closer or less close.
    """
    step_slacks = _SLACKS if table.steps.any() else _SLACKS[:1]
    for slack, step_slack in ((math.inf, math.inf), *itertools.product(_SLACKS, step_slacks)):
        allowed = state.is_open
        if slack < math.inf:
            allowed = allowed & _within_rounds(
                table, limits, floors.rounds, slack=slack, step_slack=step_slack
            )
        plan = _least_plan(table, allowed)
        objective = objective_ticks(plan, table, limits) if plan else np.inf
        if objective < state.objective:
            state = replace(state, plan=plan, objective=float(objective))
        if state.objective * _BETTER <= floors.rounds.bound:
            break
    return state


def _within_rounds(
    table: IntervalTable,
    limits: StageLimits,
    rounds: Rounds,
    *,
    slack: float,
    step_slack: float,
) -> Mask:
    """Return which intervals lie in their round of the bound, and within its T and U and a bit."""
    first, stop = _boundaries(table)
    path = rounds.best()
    within = np.zeros(table.ticks.shape, bool)
    for p in range(len(limits.stages)):
        turn = limits.round_of(p)
        begin, end = path[turn]
        own = rounds.rounds[turn]
        most = min(own.band_top[begin, end], own.slowest[begin, end] * (1 + slack))
        most_step = own.step[begin, end] * (1 + step_slack)
        within[:, p] = (first >= begin) & (stop <= end) & (table.ticks[:, p] <= most)
        within[:, p] &= table.steps[:, p] <= most_step
    return within


def _least_plan(table: IntervalTable, allowed: Mask) -> tuple[Interval, ...]:
    """Return the plan of least sum among some intervals, empty where there is none."""
    ticks = np.where(allowed, table.ticks, NEVER)
    mixes, costs = ticks.argmin(axis=0), ticks.min(axis=0)
    paths = least_sum(costs)
    if paths.least >= NEVER:
        return ()
    return tuple(
        Interval(stage=p, first=i, stop=j, mix=int(mixes[p, i, j - i - 1]))
        for p, (i, j) in enumerate(walk(costs, paths))
    )


def _swept(state: Narrowed, table: IntervalTable, limits: StageLimits, floors: _Floors) -> Narrowed:
    """Close the intervals with which the bounds are no better than the best plan.

    Two bounds: the whole plan with the least Σ F through the interval, and the interval's round.
    """
    rounds, weights = floors.rounds, floors.rounds.weights
    aim = state.objective * _BETTER
    with_it = weights.bottleneck * np.maximum(table.ticks, rounds.least_slowest)
    with_it += _least_sum_through(table, floors.sums)
    with_it += weights.step * np.maximum(table.steps, rounds.least_step)
    is_open = state.is_open & (with_it < aim)
    first, stop = _boundaries(table)
    for turn in range(limits.stages_per_rank):
        most, most_step = rounds.most_ticks(turn, aim), rounds.most_step_ticks(turn, aim)
        place = (np.minimum(first, len(most) - 1), stop)
        stages = slice(turn * limits.ranks, (turn + 1) * limits.ranks)
        is_open[:, stages] &= table.ticks[:, stages] <= most[place]
        is_open[:, stages] &= table.steps[:, stages] <= most_step[place]
    return replace(
        state,
        bound=min(max(rounds.bound, state.bound), state.objective),
        is_open=is_open,
    )


def _least_sum_through(table: IntervalTable, sums: Paths) -> Ticks:
    """Return the least sum of a plan that uses an interval, for each."""
    first, stop = _boundaries(table)
    before, after = sums.before[:-1][:, first], sums.after[1:][:, stop]
    return np.asarray(before + table.ticks + after)


def _boundaries(table: IntervalTable) -> tuple[Ticks, Ticks]:
    """Return first and stop [first, length − 1] of each interval; stops are cut off at the end."""
    count, longest = table.ticks.shape[2:]
    first, length = np.indices((count, longest))
    return first, np.minimum(first + length + 1, count)
