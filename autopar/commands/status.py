"""`autopar status`: tells how far a training has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from autopar.commands import AS_JSON
from autopar.console import print_json, results
from autopar.pages.plan_page import plain_table
from autopar.planner.cluster.toml_reading import seconds_text
from autopar.planner.errors import InputError
from autopar.runs.run_status import (
    RunStatus,
    ScheduledJob,
    kubernetes_job,
    run_folder,
    run_status,
    slurm_job,
)

_WATCH_SECONDS = 5.0


def status(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="folder of a run or a job, or of a plan with runs"),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            "--slurm",
            metavar="JOB",
            help="Also ask Slurm about this job; RUN is then its folder by default.",
        ),
    ] = None,
    kubernetes: Annotated[
        str | None,
        typer.Option("--kubernetes", metavar="NAME", help="Also ask kubectl about this job."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="NAME", help="The namespace of --kubernetes."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Print it again every 5 s, until the training is over.")
    ] = False,
    as_json: AS_JSON = False,
) -> None:
    """Tell how far a training is: step, time to finish, checkpoint, restarts, slow rank.

    Reads the metrics and checkpoints of the run, and what Slurm or Kubernetes say of its job.

    Example: autopar status out --watch
    """
    if slurm is not None and kubernetes is not None:
        raise InputError("--slurm and --kubernetes do not go together")
    if run is None and slurm is None and kubernetes is None:
        raise InputError("name a run, or its job", expected="RUN, --slurm JOB or --kubernetes NAME")
    while True:
        found = _status(run, _job(slurm, kubernetes, namespace))
        if as_json:
            print_json(asdict(found), indent=None if watch else 2)
        else:
            _tell(found, clears=watch)
        if not watch or found.is_over:
            return
        time.sleep(_WATCH_SECONDS)


def _job(slurm: str | None, kubernetes: str | None, namespace: str | None) -> ScheduledJob | None:
    if slurm is not None:
        return slurm_job(slurm)
    return None if kubernetes is None else kubernetes_job(kubernetes, namespace)


def _status(run: Path | None, job: ScheduledJob | None) -> RunStatus:
    """Return the status of the run in a folder: the given one, or else the job's."""
    if run is not None:
        return run_status(run_folder(run), job)
    of_job = job.folder if job is not None else None
    return run_status(Path(of_job) if of_job and Path(of_job).is_dir() else None, job)


def _tell(found: RunStatus, *, clears: bool) -> None:
    console = results()
    if clears and console.is_terminal:
        console.clear()
    table = plain_table("", "", "", left=2)
    table.show_header = False
    for name, text in _rows(found):
        table.add_row(name, text)
    console.print(table)


def _rows(found: RunStatus) -> Iterator[tuple[str, str]]:
    if found.folder is not None:
        yield "run", found.folder
    if found.job is not None:
        yield from _rows_of_job(found.job)
    yield "state", _state_text(found)
    if found.step is not None:
        whole = (
            "" if found.steps is None else f" of {found.steps:,} ({found.step / found.steps:.0%})"
        )
        yield "step", f"{found.step:,}{whole}"
        loss = found.loss
        yield "loss", f"{loss:.5f}" if isinstance(loss, float) else str(loss)
    if found.step_seconds is not None:
        yield "a step takes", _pace_text(found)
    if found.seconds_left is not None and not found.is_over:
        yield "left", str(timedelta(seconds=round(found.seconds_left)))
    kept = found.checkpoint_step
    yield "last checkpoint", "none" if kept is None else f"after step {kept:,}"
    yield "restarts", str(found.restarts)
    if (slow := found.slow_rank) is not None:
        own, others = seconds_text(slow.own_seconds), seconds_text(slow.others_seconds)
        yield (
            "slow",
            f"rank {slow.rank}: {slow.what} takes {own}, the others {others} (step {slow.step:,})",
        )


def _rows_of_job(job: ScheduledJob) -> Iterator[tuple[str, str]]:
    reason = f" ({job.reason})" if job.reason else ""
    yield "job", f"{job.name}: {job.state}{reason}"
    if job.nodes:
        yield "nodes", job.nodes
    if job.restarts:
        yield "starts again", f"{job.restarts:,} by the scheduler"
    if job.seconds_left is not None:
        yield "to the limit", str(timedelta(seconds=round(job.seconds_left)))


def _state_text(found: RunStatus) -> str:
    """Return the state in words, and how long ago the last line was written."""
    if found.silent_seconds is None or found.is_over:
        return found.state
    return f"{found.state}, last line {timedelta(seconds=round(found.silent_seconds))} ago"


def _pace_text(found: RunStatus) -> str:
    assert found.step_seconds is not None
    text = seconds_text(found.step_seconds)
    if found.against_plan is None or found.predicted_step_seconds is None:
        return text
    predicted = seconds_text(found.predicted_step_seconds)
    return f"{text}, {found.against_plan:.2f} times the predicted {predicted}"
