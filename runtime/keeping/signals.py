"""Turns what ranks have to agree on into answers after the same step: a signal, a written file."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from socket import socket, socketpair
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.keeping.places_in_code import place_of_main_thread
from autopar.runtime.ranks.leaving import FAILED, Verdict, tell
from autopar.runtime.ranks.mesh import Mesh

PREEMPTED = 75  # the exit code: a checkpoint has been written, and the training can go on
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_SAME_SECONDS = 1.0  # schedulers send a signal to torchrun and to ranks, which get it twice
_CHECK_SECONDS = 1.0
_MOST_STEPS = 1000
_LAST_SECONDS = 20.0  # torchrun kills its ranks 30 s after it has told them to stop


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
        self._steps_ended = 0

    def listen(self) -> None:
        """Take the signals, as long as a main thread can: others have no say in it."""
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
            if "TORCHELASTIC_RUN_ID" in os.environ:
                self._end_with_torchrun()

    def ignore(self) -> None:
        """Let no further signal end this process: it ends by itself."""
        self._steps_ended += 1
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
        self._steps_ended += 1
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

    def _end_with_torchrun(self) -> None:
        """End this process where torchrun tells it to stop and no step ends in time to do so.

        Python calls a handler between two of its own instructions: a main thread that waits for a
        device never comes to it. Signals are therefore written to a socket, too.
        """
        told, teller = socketpair()
        teller.setblocking(False)
        signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_write_no_signals)  # those of workers are others
        threading.Thread(target=self._look, args=(told, teller), daemon=True).start()

    def _look(self, told: socket, _: socket) -> None:
        while number := told.recv(1):
            ended = self._steps_ended
            if number[0] != signal.SIGTERM:
                continue
            time.sleep(_LAST_SECONDS)
            if self._before and self._steps_ended == ended:
                found = (
                    f"rank {self._mesh.rank} was told to stop, and no step has ended for "
                    f"{_LAST_SECONDS:,.0f} s: it is {place_of_main_thread()}"
                )
                tell(Verdict(FAILED, found, "--resume auto goes on from the last checkpoint"))
                os._exit(FAILED)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now - self._asked_at > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _write_no_signals() -> None:
    with suppress(ValueError):  # this is no main thread
        signal.set_wakeup_fd(-1)
