"""Predicts published runs, and tells how far the predictions are off.

python -m benchmarks.validate TABLE.csv … [-o FILE.csv] [--json]
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import autopar
from autopar.cli import main
from autopar.commands import Command
from autopar.console import results, status_line
from autopar.planner.files import refuse_others, write_whole
from benchmarks.validation.host_work import published_constants
from benchmarks.validation.outcome import validate_rows
from benchmarks.validation.page import page, predictions_csv
from benchmarks.validation.report import report_of
from benchmarks.validation.table import read_tables

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(cls=Command)
def validate(
    tables: Annotated[
        list[Path], typer.Argument(metavar="TABLE.csv", help="Published runs: docs/accuracy.md.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write each prediction to a CSV file."),
    ] = None,
) -> None:
    """Predict published runs, and tell how far the predictions are off.

    A table is CSV, one run a line; docs/accuracy.md says what its columns hold.

    Example: python -m benchmarks.validate runs.csv -o predictions.csv
    """
    if output is not None:
        refuse_others(output, beginning=predictions_csv(()))
    rows = read_tables(tables)
    with status_line("predicting") as say:
        outcomes, skipped = validate_rows(
            rows,
            zoo_folder(),
            published_constants(),
            on_row=lambda number: say(f"predicting row {number} of {len(rows)}"),
        )
    if output is not None:
        write_whole(output, predictions_csv(outcomes), what="the predictions")
    report = report_of(outcomes, skipped)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
        return
    for part in page(report):
        results().print(part)


def zoo_folder() -> Path:
    """Return the folder of the model files that come with autopar."""
    return Path(autopar.__file__).parent / "models_zoo"


if __name__ == "__main__":
    main(app)
