"""Fits the constants of framework.toml to tables of published runs; half of the rows are held out.

    python benchmarks/fit_framework.py TABLE.csv [TABLE2.csv …]

Each constant in turn is made larger and smaller; a change that lowers the mean loss is kept. The
loss of a row is |log(predicted ÷ measured)|, but at most 0.3, so that runs which went wrong have no
influence. Every second row is fitted, the others are only scored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from benchmarks.validation.host_work import PublishedConstants, published_constants
from benchmarks.validation.outcome import Outcome, validate_rows
from benchmarks.validation.scoring import score
from benchmarks.validation.skip import reason_to_skip
from benchmarks.validation.table import Row, read_tables

ZOO = Path(__file__).parents[1] / "models_zoo"
MOST_LOSS = 0.3
STEPS = (1.25, 0.8, 1.1, 0.91)
ROUNDS = 2

Change = Callable[[PublishedConstants, float], PublishedConstants]


def _own(name: str) -> Change:
    return lambda all_, factor: replace(all_, **{name: getattr(all_, name) * factor})


def _host(name: str) -> Change:
    return lambda all_, factor: replace(
        all_, host=replace(all_.host, **{name: getattr(all_.host, name) * factor})
    )


CONSTANTS: dict[str, Change] = {
    **{name: _own(name) for name in ("action_seconds", "step_seconds", "overlap_slowdown")},
    **{
        name: _host(name)
        for name in (
            "checkpoint_backward_seconds",
            "checkpoint_forward_seconds",
            "collective_seconds",
            "op_seconds",
        )
    },
}


def loss(rows: Sequence[Row], constants: PublishedConstants) -> float:
    """Return the mean loss of some rows."""
    outcomes, _ = validate_rows(rows, ZOO, constants)
    return sum(map(_loss, outcomes)) / len(outcomes)


def _loss(outcome: Outcome) -> float:
    return min(MOST_LOSS, abs(log(outcome.predicted_seconds / outcome.measured_seconds)))


def fitted(rows: Sequence[Row], start: PublishedConstants) -> PublishedConstants:
    """Return the constants that fit the rows best, one moved after the other."""
    best, least = start, loss(rows, start)
    for _ in range(ROUNDS):
        for name, change in CONSTANTS.items():
            for factor in STEPS:
                moved = change(best, factor)
                found = loss(rows, moved)
                if found < least - 1e-5:
                    best, least = moved, found
                    print(f"{name} × {factor}: {least:.4f}", flush=True)
    return best


def tell(title: str, rows: Sequence[Row], constants: PublishedConstants) -> None:
    """Print the scores of some rows."""
    outcomes, _ = validate_rows(rows, ZOO, constants)
    one = score(
        [outcome.predicted_seconds for outcome in outcomes],
        [outcome.measured_seconds for outcome in outcomes],
    )
    print(
        f"{title}: {one.count} rows, median {one.median:.1%}, 90th {one.ninetieth:.1%},"
        f" mean {one.mean:.1%}, bias {one.bias:+.1%}"
    )


def main(paths: Sequence[str]) -> None:
    """Fit to every second row, and print what was found."""
    rows = [row for row in read_tables([Path(path) for path in paths]) if not reason_to_skip(row)]
    rows.sort(key=lambda row: (row.table, row.model_name, row.gpu, row.line))
    fit, held_out = rows[::2], rows[1::2]
    start = published_constants()
    for title, constants in (("before", start), ("after", fitted(fit, start))):
        tell(f"{title}, fitted rows", fit, constants)
        tell(f"{title}, held-out rows", held_out, constants)
    print(constants)


if __name__ == "__main__":
    main(sys.argv[1:])
