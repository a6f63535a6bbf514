"""The timeline of a plan: every action once, none before its input, memory up to the peak."""

from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.planner.costs.schedules.orders import ActionKind
from autopar.planner.costs.schedules.pipeline import pipeline_seconds
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, rank_of
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.timeline import TimedAction, memory_over_step, timeline_of
from tests.planner.plan.plans import arrangement, prediction, small_plan

MICROBATCHES = 8
FORWARD, TRANSFER = 0.001, 0.0001


def plan_of(kind: ScheduleKind, *, microbatches: int = MICROBATCHES) -> Plan:
    each = SCHEDULES[kind].stages_per_rank or 2
    return small_plan(
        pipeline=2,
        arrangement=arrangement(
            pipeline=2,
            data=1,
            shard=1,
            schedule=kind,
            stages_per_rank=each,
            microbatches=microbatches,
        ),
        prediction=prediction(2 * each),
    )


@pytest.mark.parametrize("kind", ScheduleKind)
def test_every_action_runs_once_after_its_input_and_alone_on_its_rank(kind: ScheduleKind) -> None:
    timeline = timeline_of(plan := plan_of(kind, microbatches=6))
    assert timeline.is_whole
    by_name = {(one.stage, one.kind, one.microbatch): one for one in timeline.actions}
    stages = len(plan.prediction.stages)
    kinds = 3 if SCHEDULES[kind].splits_backward else 2
    assert len(by_name) == len(timeline.actions) == stages * kinds * 6
    for rank in range(2):
        own = sorted((one for one in timeline.actions if one.rank == rank), key=start)
        assert all(one.end_seconds <= other.start_seconds + 1e-12 for one, other in pairwise(own))
    for one in timeline.actions:
        assert one.rank == rank_of(kind, one.stage, 2)
        if one.kind is ActionKind.FORWARD and one.stage:
            given = by_name[one.stage - 1, ActionKind.FORWARD, one.microbatch]
            delay = TRANSFER if given.rank != one.rank else 0.0
            assert one.start_seconds >= given.end_seconds + delay - 1e-12


def start(action: TimedAction) -> float:
    return action.start_seconds


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_whole_timeline_ends_when_the_planner_says(kind: ScheduleKind) -> None:
    timeline = timeline_of(plan := plan_of(kind, microbatches=6))
    stages = [
        StageSeconds(
            forward_seconds=FORWARD,
            backward_seconds=0.002,
            input_gradient_seconds=0.0013,
            weight_gradient_seconds=0.0009,
        )
    ] * len(plan.prediction.stages)
    expected = pipeline_seconds(
        kind,
        pipeline_shape(plan.arrangement),
        stages,
        transfer_seconds=[TRANSFER] * (len(stages) - 1),
    )
    assert timeline.pipeline_seconds == pytest.approx(expected.step_seconds)
    assert max(one.end_seconds for one in timeline.actions) == timeline.pipeline_seconds


def test_a_long_step_is_shown_in_its_first_rounds() -> None:
    timeline = timeline_of(plan_of(ScheduleKind.INTERLEAVED_1F1B, microbatches=64))
    assert not timeline.is_whole
    assert timeline.microbatches < 64


def test_memory_grows_to_the_predicted_peak_of_each_rank() -> None:
    plan = plan_of(ScheduleKind.ONE_F_ONE_B)
    held = list(memory_over_step(plan, timeline_of(plan)))
    for stage, predicted in zip(plan.stages, plan.prediction.stages, strict=True):
        own = [one.bytes for one in held if one.rank == stage.rank]
        memory = predicted.memory
        assert max(own) == memory.device_bytes
        assert own[0] == own[-1] == memory.device_bytes - memory.activation_bytes


def test_a_plan_of_an_older_version_has_no_timeline() -> None:
    plan = small_plan()
    old = prediction()
    stages = tuple(replace(one, action_seconds=None) for one in old.stages)
    with pytest.raises(InputError, match="does not say how long"):
        timeline_of(replace(plan, prediction=replace(old, stages=stages)))
