"""The bound of divisible layers: never above the best of all cuts, and close to it."""

from __future__ import annotations

import math
from statistics import median

import pytest

from autopar.planner.costs.schedules.paths import Chains, first_chains
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.programs.stages.choice import EXACT, Chooser
from autopar.planner.programs.stages.divisible import Divisible
from tests.cells import cells
from tests.planner.programs.stages.stage_cases import StageCase, brute_force, random_case

KINDS = (
    ScheduleKind.INTERLEAVED_1F1B,
    ScheduleKind.INTERLEAVED_ZERO_BUBBLE,
    ScheduleKind.ZERO_BUBBLE_V,
)
ROOMS = (2.0, 0.8, 0.6)


def bound_of(case: StageCase) -> float:
    chains = Chains(first_chains(case.question.arrangement.schedule, case.question.shape))
    chooser = Chooser(case.question, EXACT, chains)
    program = Divisible(case.question, chooser.columns.transfers, chains)
    divided = program.solve(enough_seconds=math.inf, time_limit_seconds=10.0)
    return divided.bound_seconds + chooser.once


@pytest.mark.slow
@pytest.mark.parametrize("kind", cells(KINDS, KINDS[:1]))
def test_no_cut_is_below_that_of_divisible_layers(kind: ScheduleKind) -> None:
    shares = []
    for seed in range(10):
        for room in ROOMS:
            case = random_case(seed, kind=kind, most_layers=5, room=room)
            if case.question.shape.stages_per_rank == 1:
                continue
            truth, bound = brute_force(case).seconds, bound_of(case)
            assert bound <= truth * (1 + 1e-6)
            if truth < math.inf:
                shares.append(bound / truth)
    assert median(shares) > 0.8  # four layers on four stages are far from divisible
    assert max(shares) * 1.02 > 1.0  # a bound two percent higher would have been noticed
