"""Actions print as torch prints them."""

from autopar.planner.costs.schedules.orders import Action, ActionKind, columns_of, one_f_one_b
from tests.planner.costs.schedules.orders_read import format_schedule, parse_schedule, shape_of


def test_an_action_prints_stage_kind_and_microbatch() -> None:
    assert str(Action(2, ActionKind.FORWARD, 0)) == "2F0"


def test_a_schedule_prints_one_line_per_rank_and_parses_back() -> None:
    schedule = one_f_one_b(shape_of(2, 2))
    assert format_schedule(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_the_columns_of_actions_are_stage_kind_and_microbatch() -> None:
    stage, kind, microbatch = columns_of(parse_schedule("0F3 2W1")[0])
    assert (stage.tolist(), kind.tolist(), microbatch.tolist()) == ([0, 2], [0, 3], [3, 1])
