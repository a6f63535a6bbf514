"""Weighs plans, and finds by shortest paths what no plan can beat.

A plan is a path: stage p goes from the boundary where it begins to the one where it ends. The
objective, over the v stages that each rank has and m microbatches:

    v · seconds of a step  =  (m·v − 1) · Σ T  +  Σ F  +  v · Σ U

T is the slowest stage of a round (one stage of every rank), F the time of a stage, U the most that
a stage of the round does once per step. For v = 1 that is (m − 1)·T + Σ F + U. For v > 1 it is the
interleaved schedule's (m·v + R − 1)·F + v·U where stages are equal; where they are not, it takes
every round to be as long as its slowest stage makes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.programs.stages.intervals import Interval, IntervalTable
from autopar.planner.programs.stages.options import NEVER, Ticks
from autopar.planner.programs.stages.problem import StageLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The factors of T and U in the objective; that of F is 1."""

    bottleneck: int
    step: int

    @staticmethod
    def of(limits: StageLimits) -> "Weights":
        """Return the weights of a pipeline."""
        v = limits.stages_per_rank
        return Weights(bottleneck=limits.microbatches * v - 1, step=v)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paths:
    """Least cost [stage, boundary] of the stages before, and of the stages from there on."""

    before: Ticks
    after: Ticks

    @property
    def least(self) -> int:
        """The cost of the best path of all."""
        return int(self.after[0, 0])


def least_sum(costs: Ticks) -> Paths:
    """Return the paths of least sum of costs [stage, first, length − 1]."""
    stages, count, longest = costs.shape
    before = np.full((stages + 1, count + 1), NEVER)
    after = np.full((stages + 1, count + 1), NEVER)
    before[0, 0] = after[stages, count] = 0
    for stage in range(stages):
        back = stages - 1 - stage
        for length in range(1, longest + 1):
            ends, firsts = slice(length, None), slice(0, count + 1 - length)
            forth = before[stage, firsts] + costs[stage, firsts, length - 1]
            np.minimum(before[stage + 1, ends], forth, out=before[stage + 1, ends])
            home = after[back + 1, ends] + costs[back, firsts, length - 1]
            np.minimum(after[back, firsts], home, out=after[back, firsts])
    return Paths(before=before, after=after)


def walk(costs: Ticks, paths: Paths) -> list[tuple[int, int]]:
    """Return first and stop of each stage on a path of least sum."""
    stages, count, longest = costs.shape
    first, steps = 0, []
    for stage in range(stages):
        lengths = np.arange(1, min(longest, count - first) + 1)
        through = costs[stage, first, lengths - 1] + paths.after[stage + 1, first + lengths]
        stop = first + int(lengths[np.argmin(through)])
        steps.append((first, stop))
        first = stop
    return steps


def objective_ticks(plan: Sequence[Interval], table: IntervalTable, limits: StageLimits) -> int:
    """Return the objective of a plan, times v."""
    weights = Weights.of(limits)
    slowest = [0] * limits.stages_per_rank
    steps = [0] * limits.stages_per_rank
    total = 0
    for at in plan:
        turn, ticks = limits.round_of(at.stage), int(table.ticks[at.place])
        total += ticks
        slowest[turn] = max(slowest[turn], ticks)
        steps[turn] = max(steps[turn], int(table.steps[at.place]))
    return weights.bottleneck * sum(slowest) + total + weights.step * sum(steps)
