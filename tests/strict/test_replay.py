"""Replays are right to the second on logs that are worked out by hand."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest

from tests.strict.log import Communicator, Event, Issued, Log
from tests.strict.replay import (
    DeadlockError,
    Durations,
    MismatchError,
    blocked_share,
    ideal_seconds,
    step_seconds,
)

ALL = Communicator(name="all", ranks=(0, 1, 2))
LOW = Communicator(name="low", ranks=(0, 1))
HIGH = Communicator(name="high", ranks=(1, 2))


def seconds_of(work: Hashable) -> float:
    assert isinstance(work, float)
    return work


def one_second(_: Issued) -> float:
    return 1.0


TIMES = Durations(of_work=seconds_of, of_operation=one_second)


def test_computing_goes_on_beside_an_operation_until_it_is_waited_for() -> None:
    logs = [Log(), Log()]
    for log in logs:
        log.compute(2.0)
        number = log.issue(LOW, "all_reduce", 8)
        log.compute(0.5)
        log.wait(number)
        log.compute(4.0)
    assert step_seconds(_events(logs), TIMES) == 2.0 + 1.0 + 4.0


def messages_of_three(low: Communicator, high: Communicator) -> list[list[Event]]:
    """Rank 1 has sent to rank 2, which is busy for 10 s, before it receives from rank 0."""
    first, second, third = Log(), Log(), Log()
    first.wait(first.issue(low, "send", 8, peer=1))
    sent = second.issue(high, "send", 8, peer=2)
    second.wait(second.issue(low, "recv", 8, peer=0))
    second.compute(7.0)
    second.wait(sent)
    third.compute(10.0)
    third.wait(third.issue(high, "recv", 8, peer=1))
    return _events([first, second, third])


def test_a_message_waits_for_the_one_before_it_on_its_stream() -> None:
    logs = messages_of_three(ALL, ALL)
    assert step_seconds(logs, TIMES) == 10.0 + 1.0 + 1.0 + 7.0
    assert ideal_seconds(logs, TIMES) == 10.0 + 1.0  # beside 1.0 + 7.0 on rank 1
    assert blocked_share(logs, TIMES) == pytest.approx(19 / 11 - 1)


def test_messages_of_two_pairs_do_not_wait_for_each_other() -> None:
    assert blocked_share(messages_of_three(LOW, HIGH), TIMES) == 0.0


def test_two_ranks_that_send_before_they_receive_wait_for_ever() -> None:
    logs = [Log(), Log()]
    for rank, log in enumerate(logs):
        log.wait(log.issue(LOW, "send", 8, peer=1 - rank))
        log.wait(log.issue(LOW, "recv", 8, peer=1 - rank))
    told = "rank 0 waits for send with rank 1 on low; rank 1 waits for send with rank 0 on low"
    with pytest.raises(DeadlockError, match=told):
        step_seconds(_events(logs), TIMES)


def test_ranks_that_call_collectives_in_another_order_are_told() -> None:
    logs = [Log(), Log()]
    for log, ops in zip(
        logs, (("all_reduce", "broadcast"), ("broadcast", "all_reduce")), strict=True
    ):
        for op in ops:
            log.wait(log.issue(LOW, op, 8))
    told = "rank 0 has all_reduce of 8 bytes, rank 1 has broadcast of 8 bytes"
    with pytest.raises(MismatchError, match=told):
        step_seconds(_events(logs), TIMES)


def _events(logs: Sequence[Log]) -> list[list[Event]]:
    return [log.events for log in logs]
