"""Pipelines lose no time to messages that wait for others, and take the time that is planned."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.pipeline import pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.step import pipeline_shape
from tests.cells import cells
from tests.codegen.plans import pinned_plan
from tests.planner.costs.schedules.equal_stages import even_stages
from tests.strict.log import Event
from tests.strict.pipelines import durations, evaluation_logs, script_logs, small_logs
from tests.strict.replay import blocked_share, step_seconds

TOLERANCE = 0.02
TRANSFER_SECONDS = 0.05  # beside forwards of about 1 s
SPREAD = 0.3
EVERY = [(kind, ranks) for kind in ScheduleKind for ranks in (2, 4, 8)]
CELLS = cells(EVERY, [cell for cell in EVERY if cell[1] < 8])


def shape_of(kind: ScheduleKind, ranks: int) -> PipelineShape:
    return PipelineShape(
        ranks=ranks, stages_per_rank=1 if kind.has_closed_form else 2, microbatches=2 * ranks
    )


@cache
def logs_of(kind: ScheduleKind, ranks: int) -> list[list[Event]]:
    return small_logs(kind, shape_of(kind, ranks))


def uneven_stages(count: int) -> list[StageSeconds]:
    """Return stages whose seconds differ by up to 30 %, the same in each run."""
    draw = random.Random(count)
    stages = []
    for _ in range(count):
        forward, inputs, weights = (1 + draw.uniform(-SPREAD, SPREAD) for _ in range(3))
        stages.append(
            StageSeconds(
                forward_seconds=forward,
                backward_seconds=inputs + weights,
                input_gradient_seconds=inputs,
                weight_gradient_seconds=weights,
            )
        )
    return stages


@pytest.mark.parametrize(("kind", "ranks"), CELLS)
def test_no_message_holds_up_those_of_another_pair(kind: ScheduleKind, ranks: int) -> None:
    times = durations(uneven_stages(shape_of(kind, ranks).stages), TRANSFER_SECONDS)
    assert blocked_share(logs_of(kind, ranks), times) < TOLERANCE


@pytest.mark.parametrize(("kind", "ranks"), CELLS)
def test_a_step_takes_what_is_planned(kind: ScheduleKind, ranks: int) -> None:
    shape = shape_of(kind, ranks)
    stages, transfers = uneven_stages(shape.stages), [TRANSFER_SECONDS] * (shape.stages - 1)
    planned = pipeline_seconds(kind, shape, stages, transfer_seconds=transfers).step_seconds
    found = step_seconds(logs_of(kind, ranks), durations(stages, TRANSFER_SECONDS))
    assert planned == pytest.approx(found, rel=TOLERANCE)


@pytest.mark.parametrize(("kind", "ranks"), CELLS)
def test_an_evaluation_keeps_all_ranks_busy(kind: ScheduleKind, ranks: int) -> None:
    shape = shape_of(kind, ranks)
    stages = even_stages(
        shape.stages,
        forward_seconds=1.0,
        input_gradient_seconds=0.0,
        weight_gradient_seconds=0.0,
    )
    transfer_seconds = TRANSFER_SECONDS / 2  # a forward alone sends half of what a step does
    logs, times = evaluation_logs(kind, shape), durations(stages, transfer_seconds)
    found = step_seconds(logs, times)
    busy = shape.microbatches * shape.stages_per_rank
    fills = shape.stages - 1  # and empties
    assert found < (busy + fills) * (1 + 2 * transfer_seconds)
    assert blocked_share(logs, times) < TOLERANCE


@pytest.mark.parametrize("kind", cells(ScheduleKind, [ScheduleKind.ZERO_BUBBLE_V]))
def test_a_script_sends_what_its_plan_is_priced_by(kind: ScheduleKind, tmp_path: Path) -> None:
    per_rank = 1 if kind.has_closed_form else 2
    plan = pinned_plan(
        "gpt2.py",
        ("layers=8",),
        pipeline=4,
        microbatch=1,
        schedules=(kind,),
        stages_per_rank=per_rank,
    )
    stages = uneven_stages(len(plan.stages))
    times = durations(stages, TRANSFER_SECONDS)
    logs = script_logs(write_script(plan, tmp_path), plan.arrangement.ranks)
    transfers = [TRANSFER_SECONDS] * (len(stages) - 1)
    planned = pipeline_seconds(
        kind, pipeline_shape(plan.arrangement), stages, transfer_seconds=transfers
    )
    assert blocked_share(logs, times) < TOLERANCE
    assert planned.step_seconds == pytest.approx(step_seconds(logs, times), rel=TOLERANCE)
