"""Clocks of devices: how long the device itself works for a call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")
_HEAD_START_CYCLES = 2_000_000  # about a millisecond in which the host gets ahead of the device


class Clock(Protocol):
    """Runs some work and says how long it took."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and what it gave."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """The host computes. A lone thread's own time does not count what others take from it."""

    threads: int

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and what it gave."""
        now = time.thread_time if self.threads == 1 else time.perf_counter
        began = now()
        result = work()
        return now() - began, result


@dataclass(frozen=True, slots=True)
class CudaClock:
    """A GPU between two events; it is kept busy first, so that it never waits for the host."""

    def timed(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """Return the seconds of some work, and what it gave."""
        cuda: Any = torch.cuda  # torch gives these no types
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda.synchronize()
        cuda._sleep(_HEAD_START_CYCLES)
        first.record()
        result = work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3, result


def clock_of(device: str) -> Clock:
    """Return the clock of "cpu" or "cuda"."""
    return CudaClock() if device == "cuda" else CpuClock(threads=torch.get_num_threads())


def threads_of_a_rank() -> int:
    """Return how many threads torch uses in a rank on a CPU: torchrun sets one, unless told."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) > 0 else 1
