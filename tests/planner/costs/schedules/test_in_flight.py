"""Microbatches in flight, worked out by hand."""

import pytest

from autopar.planner.costs.schedules.orders import gpipe
from autopar.planner.costs.schedules.table import (
    interleaved_in_flight,
    interleaved_zero_bubble_in_flight,
    one_f_one_b_in_flight,
    zero_bubble_v_in_flight,
)
from tests.planner.costs.schedules.orders_read import peak_in_flight


@pytest.mark.parametrize(("stage", "microbatches", "held"), [(0, 8, 4), (3, 8, 1), (0, 2, 2)])
def test_1f1b_holds_one_per_stage_from_its_own_on(stage: int, microbatches: int, held: int) -> None:
    assert one_f_one_b_in_flight(stage, stages=4, microbatches=microbatches) == held


def test_gpipe_holds_every_microbatch() -> None:
    assert peak_in_flight(gpipe(3, 5)) == (5, 5, 5)


def test_interleaving_holds_a_round_more_on_the_early_stages() -> None:
    # 2 ranks of 2 stages, rounds of 2. Rank 0 warms up with (2 − 1)·2 + 2·1 = 4 forwards:
    # 0F0 0F1 2F0 2F1 (two of each), then 0F2 2B0 0F3 (four of 0) 2B1 2F2 0B0 2F3 (two of 2) …
    held = [
        interleaved_in_flight(stage, ranks=2, stages_per_rank=2, microbatches=8, per_round=2)
        for stage in (0, 2)
    ]
    assert held == [4, 2]


def test_zero_bubble_holds_as_many_on_every_rank_as_1f1b_on_the_first() -> None:
    # rank r: p − 1 − r of warm-up, one in work, r whose weight gradient is put off: p in all
    held = [
        interleaved_zero_bubble_in_flight(
            stage, ranks=4, stages_per_rank=1, microbatches=8, per_round=4
        )
        for stage in range(4)
    ]
    assert held == [4, 4, 4, 4]


def test_the_v_holds_the_same_on_every_rank() -> None:
    # rank r: 2p − r on the way down and r + 1 on the way up: 2p + 1 half-size stages each
    held = [zero_bubble_v_in_flight(stage, ranks=3, microbatches=9) for stage in range(6)]
    assert held == [6, 5, 4, 3, 2, 1]
