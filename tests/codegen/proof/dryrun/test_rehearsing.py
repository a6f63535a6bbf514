"""A rehearsal: every kind of rank runs its script alone, and the step is told again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.codegen.proof.dryrun.running import _drawn_on, distinct_ranks, rehearse
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, rank_of
from autopar.planner.plan.telling.timeline import computing_seconds, slowed_step_seconds
from autopar.runtime.ranks.mesh import ALONE
from autopar.runtime.weights.initial_weights import build, record
from tests.cells import cells
from tests.codegen.matrix import plan_of
from tests.planner.plan.plans import arrangement, prediction, small_plan


@pytest.mark.parametrize(
    "kind",
    cells(
        ("tp+sp×pp zero-bubble-v 4", "zero-3 2", "dp×pp interleaved 4"),
        {"tp+sp×pp zero-bubble-v 4"},
    ),
)
def test_a_rank_of_each_stage_computes_without_the_others(kind: str, tmp_path: Path) -> None:
    plan = plan_of("gpt2", kind)
    ranks = range(plan.arrangement.pipeline)
    found = rehearse(plan, tmp_path, pipeline_ranks=ranks, steps=1)
    assert [one.pipeline_rank for one in found.ranks] == list(ranks)
    for one in found.ranks:
        assert one.seconds > 0
        assert one.predicted_seconds == computing_seconds(plan, one.pipeline_rank)
    factors = [one.factor for one in found.ranks]
    assert found.step_seconds == pytest.approx(slowed_step_seconds(plan, factors))


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_step_told_again_with_the_predicted_times_is_the_predicted_step(
    kind: ScheduleKind,
) -> None:
    each = SCHEDULES[kind].stages_per_rank or 2
    plan = small_plan(
        pipeline=2,
        arrangement=arrangement(pipeline=2, schedule=kind, stages_per_rank=each),
        prediction=prediction(2 * each, step_seconds=0.1),
    )
    first = plan.stages[0]
    stages = [replace(first, rank=rank_of(kind, stage, 2)) for stage in range(2 * each)]
    plan = replace(plan, stages=tuple(stages))
    assert slowed_step_seconds(plan, [1.0, 1.0]) == pytest.approx(0.1)
    slower = slowed_step_seconds(plan, [1.0, 1.5])
    assert 0.1 < slower < slowed_step_seconds(plan, [1.5, 1.5])


def test_one_rank_that_computes_twice_as_long_takes_a_step_twice_as_long() -> None:
    plan = small_plan(
        arrangement=arrangement(data=1, shard=1),
        prediction=prediction(step_seconds=4 * 0.003, terms=()),
    )
    assert slowed_step_seconds(plan, [2.0]) == pytest.approx(2 * 4 * 0.003)


def test_ranks_with_equal_stages_are_measured_once() -> None:
    equal = small_plan(pipeline=2)
    assert distinct_ranks(equal) == [0]
    first, second = equal.prediction.stages
    stages = (first, replace(second, forward_seconds=2 * second.forward_seconds))
    assert distinct_ranks(replace(equal, prediction=replace(equal.prediction, stages=stages))) == [
        0,
        1,
    ]


def test_matrices_are_drawn_on_the_device_and_all_else_by_the_constructor() -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(400, 300), nn.BatchNorm1d(300))

    model, recipe = record(made, seed=0)
    with _drawn_on(torch.device("cpu")):
        recipe.materialise(model, {}, ALONE, torch.device("cpu"))
    own, whole = dict(model.named_parameters()), build(made, seed=0)
    matrix = own.pop("0.weight")
    assert not torch.equal(matrix, whole.get_parameter("0.weight"))
    assert matrix.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert all(torch.equal(one, whole.get_parameter(name)) for name, one in own.items())
