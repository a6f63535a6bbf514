"""Trains tiny scripts on processes that share the device, and compares with one process on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from uuid import uuid4

from autopar.codegen.proof.comparison import RankTrained, compared
from autopar.codegen.proof.plain import Task, TrainedAlone, train_alone
from autopar.codegen.proof.script_rank import run_script
from benchmarks.on_gpu.context import Context
from benchmarks.on_gpu.ranks.cases import CASES, STEPS, TINY_CASES, Written
from benchmarks.on_gpu.ranks.joining import joined_alone, joined_late
from benchmarks.on_gpu.ranks.lanes import in_lanes
from benchmarks.on_gpu.report import Cell, Row, error_text

TABLE = (
    "Ranks: tiny scripts of several processes on the device, beside one process of plain PyTorch"
)
_EQUAL = 1e-9  # in float64
_ARGUMENTS = ("--steps", str(STEPS), "--log-every", "1", "--data", "synthetic")


def script_rows(context: Context) -> Iterator[Row]:
    """Yield a row for each case, as long as there is time."""
    with ThreadPoolExecutor(1) as alone:  # where the one process trains
        run = partial(_compared, context, alone)
        for case, found in in_lanes(context, TINY_CASES if context.tiny else CASES, run):
            cells = {"found": error_text(found)} if isinstance(found, Exception) else found
            yield Row(table=TABLE, cells={"script": case.name, **cells})


def _compared(
    context: Context, alone: ThreadPoolExecutor, one: Written, folder: str
) -> dict[str, Cell]:
    """Train in float64, and in the planned dtype; if one training fails, the other still counts."""
    began = time.monotonic()
    coming = alone.submit(context.alone, trained_alone, one.task, context.device)

    def ranks_of(*arguments: str) -> list[RankTrained]:
        store = f"{folder}/{uuid4().hex}"
        own = [*_ARGUMENTS, *arguments]
        return context.on_ranks(trained_late, one.ranks, one.script, own, context.device, store)

    cells: dict[str, Cell] = {"found": None, "processes": one.ranks}
    try:
        cells |= _exact_cells(ranks_of("--dtype", "float64"), coming.result(), one)
    except Exception as error:
        cells["found"] = f"in float64: {error_text(error)}"
    try:
        cells |= _planned_cells(ranks_of()[0], coming.result())
    except Exception as error:
        cells["as planned"] = error_text(error)
    return {**cells, "seconds": time.monotonic() - began}


def _exact_cells(ranks: list[RankTrained], expected: TrainedAlone, one: Written) -> dict[str, Cell]:
    exact = compared(ranks, expected, one.axes)
    return {
        "found": "equal" if exact.is_within(_EQUAL) else "; ".join(("DIFFERS", *exact.faults)),
        "in float64: loss": exact.loss.largest,
        "norm": exact.norm.largest,
        "gradient": exact.gradient.largest,
        "parameter": exact.parameter.largest,
        "of": exact.parameter.name,
    }


def _planned_cells(rank: RankTrained, expected: TrainedAlone) -> dict[str, Cell]:
    losses = zip(rank.losses, expected.losses, strict=True)
    return {"as planned: losses apart, relative": max(abs(a - b) / abs(b) for a, b in losses)}


def trained_late(path: str, arguments: list[str], device: str, store: str) -> RankTrained:
    """Run a script as one of the processes of the late group."""
    with joined_late(device, store):
        return run_script(path, arguments)


def trained_alone(task: Task, device: str) -> TrainedAlone:
    """Train in one process, on the device."""
    with joined_alone(device):
        return train_alone(replace(task, device=device))
