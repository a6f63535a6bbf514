"""Lets idle cores find, in other processes, the prices that the search will need soon.

The layouts and prices that bound a node depend on its arrangement alone. While the search expands
a node, forks of its process bound the nodes that come next, and send the prices that they found.
The search still bounds every node itself, in the same order, but takes these prices as given: plans
and proofs are the same with any number of processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.layers import Compile
from autopar.planner.plan.bounds.bounding import BoundKind, Bounds
from autopar.planner.plan.search.points import SearchItem, Variant
from autopar.planner.plan.solving.candidate import layer_key
from autopar.planner.plan.solving.prices import LayerKey
from autopar.runtime.launchers import usable_cores

MOST_WORKERS = 7  # a guess: no machine with so many cores was measured
_NICENESS = 5  # where cores are few, the search goes first
_PATIENCE_SECONDS = 60.0  # after this wait the search finds the prices itself


def may_fork() -> bool:
    """Whether this process may be forked.

    A daemon may not start processes. Only on Linux it is safe to fork a process that has imported
    torch or numpy.
    """
    return sys.platform == "linux" and not current_process().daemon


Idle: TypeAlias = Callable[[], int]  # how many cores are left for workers; it may grow


def none() -> int:
    """Leave no core for workers."""
    return 0


def idle_cores(busy: int = 1) -> int:
    """Return the cores that are left for workers beside busy ones; 0 where none can be forked."""
    return max(0, usable_cores() - busy) if may_fork() else 0


def free_cores() -> int:
    """Return the cores of the machine on which nothing runs at this moment; 0 if nothing tells.

    Beside other programs the search would wait for workers longer than it takes itself.
    """
    with suppress(OSError, ValueError, IndexError):
        running = Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0]
        return (os.cpu_count() or 1) - int(running)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask:
    """A task for a worker: to find the prices that a bound of an arrangement needs.

    For the bound `OF_LAYOUTS` it only solves layouts.
    """

    inside: LayerKey
    bound_kind: BoundKind
    arrangement: Arrangement = field(compare=False)

    @property
    def layouts(self) -> tuple[int, int, Compile]:
        """The part of a task that layouts depend on; if equal, the same programs are solved."""
        return self.inside.tensor, self.inside.microbatch, self.inside.compile


def tasks_of(item: SearchItem) -> Iterator[SearchTask]:
    """Yield the tasks for the expansion of an item, then those for the items below it."""
    known = item.bound_kind if isinstance(item, Variant) else -1
    inside = layer_key(item.arrangement, 0)
    for kind in BoundKind:
        if kind >= BoundKind.OF_LAYOUTS:  # layouts are the same for any number of stages
            inside = replace(inside, is_one_stage=False)
        if kind >= min(known + 1, BoundKind.OF_LAYOUTS):
            yield SearchTask(inside=inside, bound_kind=kind, arrangement=item.arrangement)


@dataclass(slots=True)
class _SearchWorker:
    process: BaseProcess
    pipe: Connection
    task: SearchTask | None = None


class Ahead:
    """The workers of one search; they start when it has found the first prices itself.

    If the cache has all prices, none starts. `idle` is called before each node, because a core may
    become idle while the search goes on.
    """

    def __init__(self, bounds: Bounds, idle: Idle) -> None:
        self._bounds, self._prices = bounds, bounds.costing.prices
        self._idle, self._started = idle, 0
        self._workers: list[_SearchWorker] = []
        self._given: set[SearchTask] = set()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.terminate()
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join()

    def look(self, now: SearchItem, soon: Iterable[SearchItem]) -> None:
        """Take what the workers found, and give idle ones the tasks of items that come soon.

        If a worker is finding prices that the expansion of `now` needs, wait for it.
        """
        due = next(tasks_of(now))
        for worker in list(self._workers):
            task = worker.task
            if task is not None and (_is_needed(task, due) or worker.pipe.poll()):
                self._take(worker)
        if self._started < MOST_WORKERS and self._prices.have_grown:
            missing = min(self._idle(), MOST_WORKERS) - self._started
            if missing > 0:
                self._start(min(missing, free_cores()))
        self._given.add(due)
        busy = {worker.task.layouts for worker in self._workers if worker.task} | {due.layouts}
        idle = [worker for worker in self._workers if worker.task is None]
        for task in chain.from_iterable(zip_longest(*map(tasks_of, soon))) if idle else ():
            if task is not None and task not in self._given and task.layouts not in busy:
                self._give(idle.pop(), task)
                busy.add(task.layouts)
                if not idle:
                    return

    def _give(self, worker: _SearchWorker, task: SearchTask) -> None:
        self._given.add(task)
        worker.task = task
        with suppress(OSError):  # a killed worker: `_take` removes it
            worker.pipe.send(task)

    def _take(self, worker: _SearchWorker) -> None:
        """Wait for a worker's result; end a worker that is stuck, or was killed."""
        worker.task = None
        try:
            if worker.pipe.poll(_PATIENCE_SECONDS):
                for key, found in worker.pipe.recv():
                    self._prices.add(key, found)
                return
        except (EOFError, OSError):  # killed, for example for its memory
            pass
        worker.process.kill()
        self._workers.remove(worker)

    def _start(self, missing: int) -> None:
        context = get_context("fork")
        for _ in range(missing):
            here, there = context.Pipe()
            others = [*(one.pipe for one in self._workers), here]
            work = (there, others, self._bounds)
            process = context.Process(target=_work, args=work, daemon=True)
            process.start()
            there.close()
            self._workers.append(_SearchWorker(process, here))
            self._started += 1


def _work(pipe: Connection, others: Iterable[Connection], bounds: Bounds) -> None:
    """Compute one task after another, until the search ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the search, which ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(_NICENESS)
    for one in others:  # so that this worker notices when the search is gone
        one.close()
    prices = bounds.costing.prices
    with suppress(EOFError, OSError):
        while True:
            task, before = pipe.recv(), prices.sizes()
            with suppress(Exception):  # the search itself will meet the error, and report it
                _find(bounds, task)
            pipe.send(tuple(prices.since(before)))


def _is_needed(task: SearchTask, due: SearchTask) -> bool:
    """Whether a task finds what another needs."""
    return task.layouts == due.layouts and task.bound_kind <= due.bound_kind


def _find(bounds: Bounds, task: SearchTask) -> None:
    """Find the prices of a task."""
    if task.bound_kind is BoundKind.OF_LAYOUTS:
        bounds.costing.solutions(task.arrangement)
    else:
        bounds.of_kind(task.bound_kind, task.arrangement)
