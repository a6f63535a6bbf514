"""Ends a training that stands still, and tells in which step and where each rank of it waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn
from uuid import uuid4

import torch.distributed as dist

from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.keeping.places_in_code import place_of_main_thread
from autopar.runtime.keeping.roll_call import Found, Place, RollCall, told_places
from autopar.runtime.keeping.under_way import under_way
from autopar.runtime.ranks.leaving import FAILED, Verdict, tell
from autopar.runtime.ranks.mesh import Mesh

_STORE_SECONDS = 30.0  # in which the store of torchrun answers
_PATIENT = 3  # times as long for a checkpoint or an evaluation


class Watch:
    """Looks, in a thread of each rank, whether the training still takes steps.

    In one that stands still, all ranks wait for one that has stopped, reads its data for ever, or
    calls another collective. Each tells the others its place by the store of torchrun; who says
    nothing in time has stopped.
    """

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        self._mesh, self._seconds = mesh, seconds
        self._step = 0
        self._ended = threading.Event()
        self._patience = 1

    def begin(self, step: int, tell: Callable[[int, str], None]) -> None:
        """Begin to look; `tell` is what the first rank does with the message beside printing it."""
        if not self._mesh.owns_processes or self._mesh.world.size == 1 or self._mesh.is_dry_run:
            return
        self._step, self._tell = step, tell
        own = (uuid4().hex, os.environ.get("GROUP_RANK", ""), os.getpid())
        self._ranks: list[tuple[str, str, int]] = every_rank(own, self._mesh)
        threading.Thread(target=self._look, daemon=True).start()

    def note(self, step: int, *, evaluates_next: bool = False) -> None:
        """Note that a step has ended, and whether an evaluation comes with the next one."""
        self._step = step
        self._patience = _PATIENT if evaluates_next else 1

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Wait longer for what happens inside: disks may be slow."""
        before, self._patience = self._patience, _PATIENT
        yield
        self._patience = before

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        tick = min(self._seconds / 10, 1.0)
        seen, waited = self._step, 0.0  # by ticks: time in which this process was stopped is none
        while not self._ended.wait(tick):
            seen, waited = self._step, waited + tick if self._step == seen else 0.0
            if waited >= self._seconds * self._patience:
                self._give_up(waited)

    def _give_up(self, waited: float) -> NoReturn:
        """Tell where all ranks are, by the first that answers, and end this one."""
        place = Place(
            rank=self._mesh.rank,
            where=f"after step {self._step:,}, {place_of_main_thread()}",
            under_way=under_way(),
        )
        word, nodes = self._ranks[0][0], [node for _, node, _ in self._ranks]
        found = Found(teller=self._mesh.rank, silent=(), told=told_places([place]))
        with suppress(RuntimeError):  # torchrun has gone, and its store: each tells its own
            call = RollCall(_store(), word, nodes, self._mesh.rank)
            found = call.answer(place)
            if found.teller != self._mesh.rank:
                call.wait_until_told()
        if found.teller == self._mesh.rank:
            told = f"no step has ended for {waited:,.0f} s: {found.told}"
            fix = "look at what these ranks do there; --timeout SECONDS allows for longer steps"
            tell(Verdict(FAILED, told, fix))
            self._tell(self._step, told)
            with suppress(RuntimeError):
                RollCall(_store(), word, nodes, self._mesh.rank).note_told()
        for rank in found.silent:
            self._kill(rank)
        os._exit(FAILED)  # the main thread waits in a message, and takes no exception

    def _kill(self, rank: int) -> None:
        """End a rank of this node that has stopped: torchrun would wait for its SIGTERM."""
        _, node, process = self._ranks[rank]
        if node == self._ranks[self._mesh.rank][1]:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)


def _store() -> Any:
    """Return the store that the ranks have met by."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=_STORE_SECONDS)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
