"""Actions print and parse back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.schedules.actions import (
    Action,
    ActionKind,
    columns_of,
    format_schedule,
    parse_action,
    parse_schedule,
)
from autopar.planner.costs.schedules.orders import one_f_one_b
from autopar.planner.errors import InputError

ACTIONS = st.builds(Action, st.integers(0, 999), st.sampled_from(ActionKind), st.integers(0, 9999))


def test_an_action_prints_stage_kind_and_microbatch() -> None:
    assert str(Action(2, ActionKind.FORWARD, 0)) == "2F0"


@given(ACTIONS)
def test_an_action_parses_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "-1F0", "2SEND_F0", "²F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not an action"):
        parse_action(text)


def test_a_schedule_prints_one_line_per_rank_and_parses_back() -> None:
    schedule = one_f_one_b(2, 2)
    assert format_schedule(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert parse_schedule(format_schedule(schedule)) == schedule


def test_the_columns_of_actions_are_stage_kind_and_microbatch() -> None:
    stage, kind, microbatch = columns_of(parse_schedule("0F3 2W1")[0])
    assert (stage.tolist(), kind.tolist(), microbatch.tolist()) == ([0, 2], [0, 3], [3, 1])
