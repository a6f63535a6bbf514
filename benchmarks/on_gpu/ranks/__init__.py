"""Checks scripts for many GPUs, as far as one GPU can show what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeAlias

from benchmarks.on_gpu.context import Context, new_pool
from benchmarks.on_gpu.ranks.faults import fault_rows, stuck_rows
from benchmarks.on_gpu.ranks.norms import norm_rows
from benchmarks.on_gpu.ranks.recomputation import recomputation_rows
from benchmarks.on_gpu.ranks.resuming import resume_rows
from benchmarks.on_gpu.ranks.scripts import script_rows
from benchmarks.on_gpu.ranks.syncs import sync_rows
from benchmarks.on_gpu.ranks.transport import transport_rows
from benchmarks.on_gpu.report import Row, error_text

Check: TypeAlias = Callable[[Context], Iterator[Row]]

CHECKS: Mapping[str, Check] = {
    "faults": fault_rows,
    "messages": transport_rows,
    "recomputation": recomputation_rows,
    "scripts": script_rows,
    "stuck": stuck_rows,
    "resume": resume_rows,
    "norms": norm_rows,
    "syncs": sync_rows,
}
_BESIDE = ("faults", "stuck")  # run beside the checks after them, on a machine with many cores
_SIZES = (1, 2, 4)  # of worlds


def ranks(context: Context, names: Sequence[str] = tuple(CHECKS)) -> Iterator[Row]:
    """Yield the rows of checks; a check that fails yields a row with its error."""
    if context.is_gpu:  # all processes import at the same time
        context.pools |= {n: new_pool(n) for n in _SIZES if n not in context.pools}
    rows: SimpleQueue[Row] = SimpleQueue()
    with ThreadPoolExecutor(1) as beside:
        coming: list[Future[None]] = []
        for name in names:
            if context.is_gpu and name in _BESIDE:
                coming.append(beside.submit(_put, rows, name, context))
                continue
            for row in _rows(name, context):
                yield row
                yield from _taken(rows)
        while not all(one.done() for one in coming):
            time.sleep(0.1)
            yield from _taken(rows)
        yield from _taken(rows)


def _rows(name: str, context: Context) -> Iterator[Row]:
    try:
        yield from CHECKS[name](context)
    except Exception as error:
        cells = {"check": name, "error": error_text(error)}
        yield Row(table="Ranks: checks that failed", cells=cells)


def _put(rows: SimpleQueue[Row], name: str, context: Context) -> None:
    for row in _rows(name, context):
        rows.put(row)


def _taken(rows: SimpleQueue[Row]) -> Iterator[Row]:
    while True:
        try:
            yield rows.get_nowait()
        except Empty:
            return
