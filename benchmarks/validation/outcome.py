"""Predicts every row that can be predicted, and pairs what was predicted with what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from autopar.planner.costs.prediction import MemoryPrediction
from autopar.planner.errors import AutoparError
from benchmarks.validation.host_work import PublishedConstants
from benchmarks.validation.predict_row import Predicted, predict_row
from benchmarks.validation.skip import reason_to_skip
from benchmarks.validation.table import Row, stated

GIB = 2**30
_ALLOCATED = re.compile(r"\ballocated\b", re.IGNORECASE)
_DEVICE = re.compile(r"nvidia-smi|device total", re.IGNORECASE)


class MemoryKind(StrEnum):
    """Which quantity of memory a row's source measured."""

    ALLOCATED = "allocated"
    RESERVED = "reserved"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The prediction and the measurement of one row; `measured_bytes` only if the row states it."""

    row: Row
    predicted: Predicted
    predicted_seconds: float
    measured_seconds: float
    memory_kind: MemoryKind
    predicted_bytes: int
    measured_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One row that was not predicted, and why."""

    row: Row
    reason: str


def validate_rows(
    rows: Sequence[Row],
    zoo: Path,
    constants: PublishedConstants,
    *,
    on_row: Callable[[int], None] = lambda _: None,
) -> tuple[tuple[Outcome, ...], tuple[Skipped, ...]]:
    """Predict rows; return the outcomes and the skipped rows. `on_row` is called after each row."""
    outcomes: list[Outcome] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(rows, start=1):
        reason = reason_to_skip(row)
        if not reason:
            try:
                outcomes.append(outcome_of(predict_row(row, zoo, constants)))
            except AutoparError as error:
                reason = error.found
            except Exception as error:  # one row must not lose all the others
                reason = f"a fault of autopar: {type(error).__name__}: {error}"
        if reason:
            skipped.append(Skipped(row=row, reason=reason))
        on_row(number)
    return tuple(outcomes), tuple(skipped)


def outcome_of(predicted: Predicted) -> Outcome:
    """Return a prediction together with what its row states."""
    row, prediction = predicted.row, predicted.prediction
    kind = memory_kind(row)
    return Outcome(
        row=row,
        predicted=predicted,
        predicted_seconds=prediction.step_seconds,
        measured_seconds=measured_seconds(row),
        memory_kind=kind,
        predicted_bytes=_bytes_of(prediction.peak_memory, kind),
        measured_bytes=row.peak_memory_gb * GIB if row.peak_memory_gb else None,
    )


def measured_seconds(row: Row) -> float:
    """Return the seconds of one step, from throughput if the row states no time."""
    batch = stated(row.global_batch)
    if row.iteration_time_s:
        return row.iteration_time_s
    if row.tokens_per_s_per_gpu:
        return batch * stated(row.seq_len) / (row.tokens_per_s_per_gpu * stated(row.gpus))
    assert row.samples_per_s is not None
    return batch / row.samples_per_s


def memory_kind(row: Row) -> MemoryKind:
    """Return which memory the row says was measured: if nothing, torch's reserved memory."""
    if _ALLOCATED.search(row.notes):
        return MemoryKind.ALLOCATED
    return MemoryKind.DEVICE if _DEVICE.search(row.notes) else MemoryKind.RESERVED


def _bytes_of(memory: MemoryPrediction, kind: MemoryKind) -> int:
    return {
        MemoryKind.ALLOCATED: memory.allocated_bytes,
        MemoryKind.RESERVED: memory.reserved_bytes,
        MemoryKind.DEVICE: memory.device_bytes,
    }[kind]
