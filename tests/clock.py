"""Measures seconds of this process as they would be on a machine of a known speed."""

from __future__ import annotations

import time
from collections.abc import Callable

_WORK, _WORK_SECONDS = 300_000, 0.020  # of additions, and what they take on such a machine


def least_seconds(work: Callable[[], object], *, tries: int = 5) -> float:
    """Return the quickest try's seconds, divided by how much slower this machine is.

    Other programs delay a try and do not hasten one, so the quickest tells what the work takes.
    """
    return min(map(_seconds, [work] * tries)) / min(map(_slowness, range(tries)))


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _slowness(_: int) -> float:
    return max(1.0, _seconds(_additions) / _WORK_SECONDS)


def _additions() -> int:
    total = 0
    for number in range(_WORK):
        total += number
    return total
