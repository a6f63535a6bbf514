"""What the host is measured to add."""

import time

import pytest
import torch.distributed as dist

from autopar.planner.profile.actions import action_times
from autopar.planner.profile.net_rank import typical
from autopar.planner.profile.passes import pass_times
from autopar.planner.profile.units import unit_times


def test_running_again_and_splitting_take_microseconds_for_each_op_and_more_for_a_layer() -> None:
    times = pass_times("cpu", time.thread_time)
    assert 2e-6 < times.selective_seconds < 2e-3
    assert 0.0 <= times.split_input_seconds < times.split_weight_seconds
    assert 2e-6 < times.split_weight_seconds < 2e-3
    assert 2e-5 < times.checkpoint_seconds < 2e-2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sharded_unit_takes_hooks_and_copies_and_leaves_no_process_group(ranks: int) -> None:
    unit = unit_times(ranks)
    assert 1e-6 < unit.gather_seconds < 1e-1
    assert unit.gather_byte_seconds + unit.scatter_byte_seconds > 1e-12
    assert not dist.is_initialized()


def test_the_schedule_of_a_pipeline_takes_its_thread_some_of_a_millisecond_for_an_action() -> None:
    times = action_times(2)
    assert 2e-5 < times.plain_seconds < 2e-2
    assert 2e-5 < times.one_stage_seconds < 2e-2
    assert 2e-5 < times.several_stages_seconds < 2e-2
    assert not dist.is_initialized()


def test_a_typical_block_is_neither_the_luckiest_nor_a_hiccup() -> None:
    assert typical([0.0, *[1.0] * 4, *[2.0] * 4, 100.0]) == pytest.approx(1.5)
    assert typical([3.0]) == 3.0
