"""Writes checkpoints beside the training: copied after one step, put in place after a later one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

from autopar.runtime.keeping.host_copies import Room
from autopar.runtime.keeping.safetensors_file import Written
from autopar.runtime.keeping.writing import Snapshot, put_in_place
from autopar.runtime.ranks.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is whole, or why there is none."""

    step: int
    failure: str | None
    seconds: float  # from its step until it was in place
    waited_seconds: float  # of these the training stood still


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnderWay:
    taken: Snapshot
    file: Future[Written | str]
    begun: float
    waited_seconds: float


class Saving:
    """The checkpoint that is being written, one at a time.

    A thread of each rank writes its file, and sends no message: messages of two threads would need
    groups of their own. What the ranks have to agree on, they do between two steps.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._room = mesh, Room()
        self._one: _UnderWay | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is one; it is so on all ranks, or on none."""
        return self._one is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes."""
        return self._one is not None and not self._one.file.done()

    def begin(self, taken: Snapshot, begun: float) -> None:
        """Copy this rank's share and write it in a thread; `begun` is when the training stopped.

        A rank whose host has no room for the copy writes at once; the others need not know.
        """
        file: Future[Written | str] = Future()
        try:
            taken = replace(taken, tensors=self._room.copied(taken.tensors))
        except (MemoryError, RuntimeError):
            _write(taken, file)
        else:  # a rank that fails leaves at once, whether this has ended or not
            threading.Thread(target=_write, args=(taken, file), daemon=True).start()
        waited = time.perf_counter() - begun
        self._one = _UnderWay(taken=taken, file=file, begun=begun, waited_seconds=waited)

    def finish(self) -> Saved:
        """Put what all ranks have written in place; who has not done so yet is waited for."""
        assert self._one is not None
        one, self._one, resumed = self._one, None, time.perf_counter()
        failure = put_in_place(one.taken, one.file.result(), self._mesh)
        now = time.perf_counter()
        return Saved(
            step=one.taken.step,
            failure=failure,
            seconds=now - one.begun,
            waited_seconds=one.waited_seconds + now - resumed,
        )

    def write_at_once(self, taken: Snapshot, begun: float) -> Saved:
        """Write a checkpoint while the training waits, without a copy."""
        failure = put_in_place(taken, taken.write(), self._mesh)
        seconds = time.perf_counter() - begun
        return Saved(step=taken.step, failure=failure, seconds=seconds, waited_seconds=seconds)


def _write(taken: Snapshot, file: Future[Written | str]) -> None:
    try:
        file.set_result(taken.write())
    except BaseException as error:  # which the main thread raises
        file.set_exception(error)
