"""The validator finds each kind of fault."""

import pytest

from autopar.planner.costs.schedules.orders import Action, ActionKind, one_f_one_b
from autopar.planner.errors import InputError
from tests.planner.costs.schedules.orders_read import parse_schedule, shape_of
from tests.planner.costs.schedules.schedule_faults import (
    dependencies,
    require_valid,
    schedule_faults,
)


def faults(text: str) -> tuple[str, ...]:
    """Return the faults of a schedule of two stages and one microbatch."""
    return schedule_faults(parse_schedule(text), stages=2, microbatches=1)


def test_whole_and_split_backwards_are_both_complete() -> None:
    assert faults("0F0 0B0\n1F0 1B0") == ()
    assert faults("0F0 0I0 0W0\n1F0 1I0 1W0") == ()


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ("0F0\n1F0 1B0", "stage 0 computes microbatch 0 as 1 F, 0 B, 0 I, 0 W"),
        ("0F0 0B0 0B0\n1F0 1B0", "stage 0 computes microbatch 0 as 1 F, 2 B"),
        ("0F0 0I0\n1F0 1B0", "stage 0 computes microbatch 0 as 1 F, 0 B, 1 I, 0 W"),
        ("0F0 0B0 0W0\n1F0 1B0", "stage 0 computes microbatch 0 as 1 F, 1 B, 0 I, 1 W"),
        ("0F0 0B0\n1F0 1B0 1F1", "1F1 is not of one of the 1 microbatches"),
        ("0F0 0B0\n1F0 1B0 2F0", "stage 2 is not one of the 2 stages"),
        ("0F0 1B0\n1F0 0B0", "stage 0 runs on ranks 0, 1"),
    ],
)
def test_an_incomplete_schedule_is_named(schedule: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults(schedule)), faults(schedule)


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ("0B0 0F0\n1F0 1B0", "rank 0 waits for ever at 0B0"),
        ("0F0 0B0\n1B0 1F0", "rank 1 waits for ever at 1B0"),
        ("0F0 0W0 0I0\n1F0 1B0", "rank 0 waits for ever at 0W0"),
        ("1F0 0F0 1B0 0B0", "rank 0 waits for ever at 1F0"),
    ],
)
def test_a_deadlock_is_named(schedule: str, fault: str) -> None:
    assert fault in faults(schedule)


def test_crossing_orders_of_two_ranks_deadlock() -> None:
    # rank 0 wants its gradient of microbatch 1 first, for which rank 1 wants the forward of 0 done
    schedule = parse_schedule("0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1")
    assert schedule_faults(schedule, stages=2, microbatches=2) == (
        "rank 0 waits for ever at 0B1",
        "rank 1 waits for ever at 1F0",
    )


def test_faults_are_told_together_and_not_all_of_them() -> None:
    with pytest.raises(InputError, match="and 22 more"):
        require_valid(one_f_one_b(shape_of(2, 16)), stages=4, microbatches=16)


def test_a_gradient_waits_for_its_own_forward_and_for_the_next_stage() -> None:
    needed = dependencies(Action(0, ActionKind.BACKWARD, 3), stages=2)
    assert [[str(one) for one in alternatives] for alternatives in needed] == [
        ["0F3"],
        ["1B3", "1I3"],
    ]
