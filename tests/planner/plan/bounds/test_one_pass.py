"""What the bounds say of the only backward of a step, beside all ways to run its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

import pytest

from autopar.planner.costs.prediction import LayerCost, Zero
from autopar.planner.costs.steps.memory import context_bytes, layer_unsharded_bytes, memory_of
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.costs.steps.state import state_bytes
from autopar.planner.plan.bounds.bottleneck import PipelineRoom, StageRoom, least_bottleneck_seconds
from autopar.planner.plan.bounds.least import (
    activation_budget_bytes,
    least_recompute_seconds,
)
from autopar.planner.plan.bounds.step import LayoutFacts, facts_of
from tests.planner.programs.stages.stage_cases import StageCase, different, whole_case

ROUNDING = 1 + 1e-9


def equal_layers(case: StageCase) -> StageCase:
    """Return the case with its second layer in all places."""
    question = case.question
    row = (question.rows[0][1],) * len(question.rows[0])
    return replace(case, question=replace(question, rows=(row,)))


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the layers, and what it needs; both are the same in any room."""

    costs: tuple[LayerCost, ...]
    needed_bytes: int


def ways(case: StageCase) -> list[Way]:
    """Return every way to run the layers."""
    question = case.question
    every = product(*([one[mode] for mode in different(one)] for one in question.rows[0]))
    return [
        Way(
            costs,
            memory_of(
                [stage_load(costs)], question.moments[0], question.arrangement, question.constants
            ).device_bytes,
        )
        for costs in every
    ]


def recompute_bound(case: StageCase, facts: LayoutFacts, size_bytes: float) -> float:
    arrangement = case.question.arrangement
    budget = activation_budget_bytes(
        arrangement,
        rank_bytes=size_bytes / (1 + case.question.constants.margin)
        - facts.transient_bytes(arrangement),
        state_bytes=facts.state_bytes(arrangement),
    )
    return least_recompute_seconds(facts.ladder, budget)


def compute_bound(case: StageCase, facts: LayoutFacts, size_bytes: float) -> float:
    arrangement = case.question.arrangement
    room = PipelineRoom(
        ranks=((StageRoom(in_flight=1, size_bytes=size_bytes),),),
        state_bytes=state_bytes(facts.repeated, arrangement),
        unsharded_bytes=layer_unsharded_bytes(facts.repeated, arrangement),
        transient_bytes=facts.transient_bytes(arrangement),
        margin=case.question.constants.margin,
        is_one_pass=arrangement.is_one_pass,
    )
    return least_bottleneck_seconds(facts.block, room)


@pytest.mark.parametrize("are_equal", [False, True])
@pytest.mark.parametrize("zero", Zero)
def test_no_way_to_run_the_layers_is_faster_than_the_bounds(zero: Zero, are_equal: bool) -> None:
    pressed = 0
    for seed in range(12):
        every: list[Way] = []
        for room in (0.9, 0.8, 0.6):
            case = whole_case(seed, zero=zero, layers=5, room=room)
            case = equal_layers(case) if are_equal else case
            question = case.question
            if not question.arrangement.is_one_pass:
                continue
            size = question.limit_bytes[0] - context_bytes(question.arrangement, question.constants)
            facts = facts_of(question.rows[0])
            every = every or ways(case)
            fitting = [way.costs for way in every if way.needed_bytes <= question.limit_bytes[0]]
            again = [sum(one.recompute_seconds for one in costs) for costs in fitting]
            whole = [
                sum(c.forward_seconds + c.backward_seconds for c in costs) for costs in fitting
            ]
            assert recompute_bound(case, facts, size) <= min(again, default=math.inf) * ROUNDING
            assert compute_bound(case, facts, size) <= min(whole, default=math.inf) * ROUNDING
            pressed += bool(fitting) and min(again) > 0
    assert pressed > 3
