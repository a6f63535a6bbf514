"""The constants of frameworks that come with autopar."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from autopar.planner.costs.ops.measurements import ActionTimes
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.framework import read_framework_constants
from tests.planner.costs.kernels.compute_factories import round_rates
from tests.planner.costs.step_factories import ARRANGEMENT, SILENT


def test_all_constants_are_read_with_their_units() -> None:
    constants = read_framework_constants()
    assert 0 < constants.action_seconds < constants.step_seconds < 0.1
    assert 0 < constants.overlap_slowdown < 1
    assert 0 < constants.margin < 1
    assert constants.context_bytes > 2**29
    assert all(0 < seconds < 0.01 for seconds in astuple(constants.host))


@pytest.mark.parametrize(
    ("pipeline", "schedule", "per_rank", "expected"),
    [
        (1, ScheduleKind.GPIPE, 1, 1e-5),
        (2, ScheduleKind.ONE_F_ONE_B, 1, 1e-5 + 2e-4),
        (2, ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 1, 1e-5 + 3e-4),
        (2, ScheduleKind.INTERLEAVED_1F1B, 2, 1e-5 + 4e-4),
    ],
)
def test_the_schedule_of_a_pipeline_adds_to_its_actions_what_was_measured(
    pipeline: int, schedule: ScheduleKind, per_rank: int, expected: float
) -> None:
    times = ActionTimes(plain_seconds=2e-4, one_stage_seconds=3e-4, several_stages_seconds=4e-4)
    measured = replace(SILENT, action_seconds=1e-5, pipeline=times)
    arrangement = replace(
        ARRANGEMENT, pipeline=pipeline, schedule=schedule, stages_per_rank=per_rank
    )
    assert measured.action_on(arrangement) == pytest.approx(expected)
    assert replace(measured, pipeline=None).action_on(arrangement) == 1e-5


def test_a_unit_is_read_and_written_at_the_rate_of_memory_where_it_was_not_measured() -> None:
    constants, rates = read_framework_constants(), round_rates()
    by_rate = constants.unit_on(rates)
    assert by_rate.gather_byte_seconds == 2 / rates.stream_bytes_per_second
    assert by_rate.scatter_byte_seconds == by_rate.gather_byte_seconds
    own = replace(by_rate, gather_seconds=1e-3)
    assert replace(constants, unit=own).unit_on(rates) == own
