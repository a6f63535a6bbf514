"""Microbatches in flight: worked out by hand, and counted along whole orders."""

from autopar.planner.costs.schedules.table import (
    ScheduleKind,
    forwards_first,
    in_flight,
)
from tests.planner.costs.schedules.orders_read import shape_of


def test_1f1b_holds_one_per_stage_from_its_own_on() -> None:
    assert in_flight(ScheduleKind.ONE_F_ONE_B, shape_of(4, 8)) == (4, 3, 2, 1)


def test_gpipe_holds_every_microbatch() -> None:
    assert in_flight(ScheduleKind.GPIPE, shape_of(3, 50)) == (50, 50, 50)


def test_interleaving_holds_a_round_more_on_the_early_stages() -> None:
    # 2 ranks of 2 stages, rounds of 2. Rank 0 warms up with (2 − 1)·2 + 2·1 = 4 forwards:
    # 0F0 0F1 2F0 2F1 (two of each), then 0F2 2B0 0F3 (four of 0) 2B1 2F2 0B0 2F3 (two of 2) …
    assert in_flight(ScheduleKind.INTERLEAVED_1F1B, shape_of(2, 8, 2))[::2] == (4, 2)


def test_zero_bubble_holds_as_many_on_every_rank_as_1f1b_on_the_first() -> None:
    # rank r: p − 1 − r of warm-up, one in work, r whose weight gradient is put off: p in all
    assert in_flight(ScheduleKind.INTERLEAVED_ZERO_BUBBLE, shape_of(4, 8)) == (4, 4, 4, 4)


def test_the_v_holds_the_same_on_every_rank() -> None:
    # rank r: 2p − r on the way down and r + 1 on the way up: 2p + 1 half-size stages each
    assert in_flight(ScheduleKind.ZERO_BUBBLE_V, shape_of(3, 9, 2)) == (6, 5, 4, 3, 2, 1)


def test_zero_bubble_runs_as_many_forwards_first_as_there_are_ranks_behind_and_itself() -> None:
    kind = ScheduleKind.INTERLEAVED_ZERO_BUBBLE
    assert forwards_first(kind, shape_of(4, 12)) == (4, 3, 2, 1)
    assert forwards_first(kind, shape_of(4, 2)) == (2, 2, 2, 1)
