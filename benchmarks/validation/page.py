"""Turns the report of a validation into tables for people, plain data and CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from rich.table import Table

from autopar.pages.plan_page import plain_table
from benchmarks.validation.outcome import Outcome
from benchmarks.validation.report import Report, Section
from benchmarks.validation.scoring import Score

PREDICTION_COLUMNS = (
    *("table", "line", "model_name", "gpu", "gpus", "tp", "pp", "dp", "micro_batch"),
    *("measured_seconds", "predicted_seconds", "time_error"),
    *("memory_kind", "measured_gib", "predicted_gib", "memory_error"),
)


def page(report: Report) -> Iterator[Table]:
    """Yield the tables: time, memory, ranking, and what was skipped."""
    sections = (*report.sections, report.total)
    yield _scores("Step time", [(one.name, one.time) for one in sections])
    yield _scores("Memory", [(one.name, one.memory) for one in sections])
    yield _ranking(sections)
    yield _skipped(report)


def _scores(title: str, rows: Sequence[tuple[str, Score | None]]) -> Table:
    table = plain_table(title, "table", "rows", "median", "90th", "mean", "bias", "95 % below")
    for name, found in rows:
        if found is not None:
            table.add_row(
                name,
                str(found.count),
                f"{found.median:.1%}",
                f"{found.ninetieth:.1%}",
                f"{found.mean:.1%}",
                f"{found.bias:+.1%}",
                f"{found.reach:.2f} ×",
            )
    return table


def _ranking(sections: Sequence[Section]) -> Table:
    title = "Rank correlation (Kendall τ) among runs of a model on the same devices"
    table = plain_table(title, "table", "groups", "least τ", "median τ")
    for one in sections:
        if one.least_tau is not None and one.median_tau is not None:
            table.add_row(
                one.name, str(len(one.groups)), f"{one.least_tau:.2f}", f"{one.median_tau:.2f}"
            )
    return table


def _skipped(report: Report) -> Table:
    table = plain_table("Rows that were not predicted", "table", "reason", "rows", left=2)
    for one in report.reasons:
        table.add_row(one.table, one.reason, str(one.count))
    return table


def predictions_csv(outcomes: Sequence[Outcome]) -> str:
    """Return one line per predicted row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PREDICTION_COLUMNS)
    for one in outcomes:
        writer.writerow(_cells(one))
    return text.getvalue()


def _cells(one: Outcome) -> tuple[object, ...]:
    row, gib = one.row, 2**30
    measured = one.measured_bytes
    return (
        *(row.table, row.line, row.model_name, row.gpu, row.gpus, row.tp, row.pp, row.dp),
        row.micro_batch,
        f"{one.measured_seconds:.6g}",
        f"{one.predicted_seconds:.6g}",
        f"{one.predicted_seconds / one.measured_seconds - 1:.4f}",
        str(one.memory_kind) if measured else "",
        f"{measured / gib:.2f}" if measured else "",
        f"{one.predicted_bytes / gib:.2f}",
        f"{one.predicted_bytes / measured - 1:.4f}" if measured else "",
    )
