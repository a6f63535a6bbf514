"""Tests of the integer program over stages: on all intervals, with nothing narrowed beforehand."""

import inspect
import math
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autopar.planner.programs.solver import SolverName
from autopar.planner.programs.stages import program as stages
from autopar.planner.programs.stages.bounds import objective_ticks
from autopar.planner.programs.stages.choice import StagePlan, choose_stages
from autopar.planner.programs.stages.intervals import Interval, IntervalTable, StagePricing
from autopar.planner.programs.stages.options import NEVER
from autopar.planner.programs.stages.problem import (
    LayerChoices,
    LayerOption,
    LayerRun,
    StageLimit,
    StageLimits,
)
from autopar.planner.programs.stages.program import decide
from tests.planner.programs.stages.stage_cases import Case, best_by_trying_all, cases

many = settings(max_examples=200, suppress_health_check=list(HealthCheck))


def all_intervals(case: Case) -> tuple[StagePricing, IntervalTable, list[Interval]]:
    pricing = StagePricing(*case)
    table = pricing.table(len(case[0].layers))
    intervals = [
        Interval(mix=k, stage=p, first=i, stop=i + length + 1)
        for k, p, i, length in np.argwhere(table.ticks < NEVER).tolist()
    ]
    return pricing, table, intervals


def seconds_by(solver: SolverName, case: Case) -> float:
    pricing, table, intervals = all_intervals(case)
    if not intervals:
        return math.inf
    decision = decide(intervals, table, case[1], time_limit_seconds=60.0, solver=solver)
    assert decision.is_proved
    if not decision.plan:
        return math.inf
    ticks = objective_ticks(decision.plan, table, case[1])
    return ticks / pricing.ticks_per_second / case[1].stages_per_rank


@many
@given(cases())
def test_the_program_alone_finds_the_best_of_all_plans_with_either_solver(case: Case) -> None:
    best = best_by_trying_all(*case)
    expected = math.inf if best is None else best
    assert seconds_by(SolverName.HIGHS, case) == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert seconds_by(SolverName.CBC, case) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@many
@given(cases())
def test_narrowing_and_program_agree(case: Case) -> None:
    answer = choose_stages(*case)
    narrowed = answer.objective_seconds if isinstance(answer, StagePlan) else math.inf
    assert seconds_by(SolverName.HIGHS, case) == pytest.approx(narrowed, rel=1e-7, abs=1e-9)


def test_a_single_layer_that_takes_all_the_time_can_be_solved() -> None:
    layer = LayerOption(name="only", seconds=0.0, step_seconds=0.5)
    choices = LayerChoices(options=(((layer,),),), runs=(LayerRun(layer_class=0, count=1),))
    limits = StageLimits(stages=(StageLimit(memory_bytes=6),), microbatches=1)
    assert seconds_by(SolverName.HIGHS, (choices, limits)) == pytest.approx(0.5)


def test_the_docstring_lists_every_family_of_constraints() -> None:
    listed = re.findall(r"^ {4}(\w+) {2,}.* [=≥] ", stages.__doc__ or "", flags=re.MULTILINE)
    families = [
        name
        for name, function in inspect.getmembers(stages, inspect.isfunction)
        if function.__module__ == stages.__name__
        and next(iter(inspect.signature(function).parameters), "") == "program"
    ]
    assert sorted(listed) == sorted(families)
