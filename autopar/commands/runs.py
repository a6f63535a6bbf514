"""`autopar runs`: the runs in a folder, and what has become of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autopar.console import print_json, results, tell_note
from autopar.pages.checkpoint_pages import time_text
from autopar.pages.tables import plain_table
from autopar.planner.cluster.units import seconds_text
from autopar.planner.errors import InputError
from autopar.runs.run_folder import RUNS
from autopar.runs.run_metrics import last_lines, last_step
from autopar.runs.run_record import RunRecord, as_data, read_record, runs_in


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="of runs, of a plan, or of one run")
    ] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List runs: when, which plan, what became of each, its last step, loss and seconds a step.

    Example: autopar runs out
    """
    found = _runs(folder)
    if not found:
        raise InputError(
            f"there are no runs in {folder}",
            expected="what `autopar run PLAN` makes in the folder runs beside the plan",
        )
    steps = [_last_step(record.metrics_in(path)) for path, record in found]
    if as_json:
        pairs = zip(found, steps, strict=True)
        print_json([_as_data(path, record, step) for (path, record), step in pairs])
        return
    table = plain_table("", "run", "started", "plan", "state", "step", "loss", "a step", left=4)
    for (path, record), step in zip(found, steps, strict=True):
        table.add_row(
            Text(path.name),
            time_text(record.started_at),
            record.plan,
            str(record.state),
            f"{step['step']:,}" if "step" in step else "",
            _figure(step.get("loss")),
            seconds_text(step["seconds"]) if step.get("seconds") is not None else "",
        )
    results().print(table)


def _runs(folder: Path) -> list[tuple[Path, RunRecord]]:
    """Return the runs of a folder, or of that of a plan beside which they are."""
    own = read_record(folder)
    if own is not None:
        return [(folder, own)]
    return runs_in(folder) or runs_in(folder / RUNS)


def _last_step(metrics: Path) -> dict[str, Any]:
    """Return what the last step told; nothing where the file cannot be read, which others can."""
    try:
        return last_step(last_lines(metrics)) or {}
    except InputError as error:
        tell_note(error.found)
        return {}


def _figure(loss: object) -> str:
    return f"{loss:.5f}" if isinstance(loss, float) else str(loss or "")


def _as_data(path: Path, record: RunRecord, step: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(path), **as_data(record), "last_step": step}
