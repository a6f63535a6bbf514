"""Runs a function on ranks as strict as those of nccl, and replays what they told each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tests.runtime.processes import LOG, run_on_ranks
from tests.strict import group
from tests.strict.log import Event, Issued, Waited
from tests.strict.replay import Durations, step_seconds

Result = TypeVar("Result")


def run_on_strict_ranks(
    function: Callable[..., Result], size: int, *args: Any, timeout_seconds: float = 60.0
) -> list[Result]:
    """Call function(*args) on ranks 0 … size − 1; fail where streams of nccl would stand still."""
    found = logged_on_ranks(function, size, *args, timeout_seconds=timeout_seconds)
    logs = [log for _, log in found]
    step_seconds(logs, Durations())
    for rank, log in enumerate(logs):
        assert not (left := _never_waited_for(log)), f"rank {rank} never waits for {left[0]}"
    return [result for result, _ in found]


def _never_waited_for(log: Sequence[Event]) -> list[Issued]:
    """Return operations whose results nothing may use: nccl may still be at them."""
    waited = {one.number for one in log if isinstance(one, Waited)}
    return [one for one in log if isinstance(one, Issued) and one.number not in waited]


def logged_on_ranks(
    function: Callable[..., Result], size: int, *args: Any, timeout_seconds: float = 60.0
) -> list[tuple[Result, list[Event]]]:
    """Return the results with the logs of the ranks."""
    return run_on_ranks(
        _logged, size, function, *args, timeout_seconds=timeout_seconds, backend=group.NAME
    )


def _logged(function: Callable[..., Result], *args: Any) -> tuple[Result, list[Event]]:
    return function(*args), list(LOG.events)
