"""Turns what ranks have to agree on into answers after the same step: a signal, a written file."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks.mesh import Mesh

PREEMPTED = 75  # the exit code: a checkpoint has been written, and the training can go on
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_SAME_SECONDS = 1.0  # schedulers send a signal to torchrun and to ranks, which get it twice
_CHECK_SECONDS = 1.0
_MOST_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all ranks know after a step; in those in which they do not ask, nothing."""

    stops: bool = False  # someone has asked the process of a rank to stop
    is_written: bool = False  # no rank writes any more
    is_due: bool = False  # time has come for a checkpoint


class StopWish:
    """Whether someone has asked this process, or that of another rank, to stop.

    Ranks ask each other about once a second, or in each step where those are longer: a message in
    each step of 10 ms costs 3 % of it. The answer says in how many steps they ask again.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked_at: float | None = None
        self._before: dict[int, Any] = {}
        self._checked_step: int | None = None
        self._checked_at = time.monotonic()
        self._steps_between = 1

    def listen(self) -> None:
        """Take the signals, as long as a main thread can: others have no say in it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}

    def ignore(self) -> None:
        """Let no further signal end this process: it ends by itself."""
        for one in self._before:
            signal.signal(one, signal.SIG_IGN)

    def let_go(self) -> None:
        """Leave the signals to who had them before."""
        for one, handler in self._before.items():
            if handler is not None:  # else it was none of Python's
                signal.signal(one, handler)
        self._before = {}

    def ask(self, step: int, *, is_writing: bool = False, is_due: bool = False) -> Answer:
        """Return what the ranks agree on; all of them ask after every step."""
        last = step - 1 if self._checked_step is None else self._checked_step
        if step < last + self._steps_between:
            return Answer()
        now = time.monotonic()
        seconds = max(now - self._checked_at, 1e-6) / (step - last)
        own = min(max(int(_CHECK_SECONDS / seconds), 1), _MOST_STEPS)
        is_asked = self._asked_at is not None
        told = [float(is_asked), float(is_writing), float(is_due), float(-own)]
        found = torch.tensor(told, device=self._mesh.device)
        if self._mesh.world.size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._mesh.world.group)
        stops, writing, due, steps = found.tolist()
        self._checked_step, self._checked_at = step, time.monotonic()
        self._steps_between = int(-steps)
        return Answer(stops=bool(stops), is_written=not writing, is_due=bool(due))

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
