"""Turns a run into run.json of its folder, and back: when, what, where, how it ended."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.console import tell_note
from autopar.planner.destination import write_whole
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.given import read_given
from autopar.planner.numbers import SomeSeconds
from autopar.planner.written import damaged, told
from autopar.runtime.keeping.claim import is_held
from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.records import parsed
from autopar.runtime.shown import masked

RECORD = "run.json"
METRICS = "metrics.jsonl"
PRIVATE = 0o600  # of files that say how a run was started
_MARK = "autopar"
_MOST_CHARACTERS = 100_000
_HIDDEN = "***"
Time = Annotated[float, Ge(0), Le(2e11)]  # seconds since 1970, before the year 8000


class RunState(StrEnum):
    """What has become of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"  # stopped by a signal, with a checkpoint to go on from
    INTERRUPTED = "interrupted"  # stopped by a signal, without
    KILLED = "killed"  # `autopar run` ended without a word


EXIT_CODES = {
    RunState.FINISHED: ExitCode.DONE,
    RunState.FAILED: ExitCode.TRAINING_FAILED,
    RunState.PREEMPTED: ExitCode.PREEMPTED,
    RunState.INTERRUPTED: ExitCode.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What run.json says. Places in the run's folder are told from there: it may be moved."""

    written_by: str = _MARK
    name: str
    model: str  # path.py:factory
    arguments: tuple[tuple[str, str], ...]
    plan: str  # in words
    predicted_step_seconds: SomeSeconds
    command: str
    checkpoints: str | None  # the folder, None where the script itself was told one
    metrics: str
    goes_on_from: str | None = None
    host: str
    process: int
    started_at: Time
    ended_at: Time | None = None
    state: RunState = RunState.RUNNING
    why: str | None = None  # it failed

    def metrics_in(self, folder: Path) -> Path:
        """Return the file of its metrics, where its record is in that folder."""
        return folder / self.metrics

    def checkpoints_in(self, folder: Path) -> Location | None:
        """Return the folder of its checkpoints, where its record is in that folder."""
        if self.checkpoints is None:
            return None
        if "://" not in self.checkpoints:
            return folder / self.checkpoints
        if _HIDDEN in self.checkpoints:
            raise InputError(
                f"the checkpoints of the run are in {self.checkpoints}, whose password is not kept",
                where=str(folder / RECORD),
                fix="name that place yourself: --resume URL",
            )
        return location(self.checkpoints)

    def as_seen_now(self, folder: Path) -> RunRecord:
        """Return it with what has become of it, where its process could not say so."""
        is_gone = self.state is RunState.RUNNING and not is_held(folder)
        return replace(self, state=RunState.KILLED) if is_gone else self


class _File(BaseModel):
    """The settings of pydantic reach the dataclass in it: nothing coerced, nothing unknown."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, str_max_length=_MOST_CHARACTERS
    )

    record: RunRecord


def own_process() -> tuple[str, int]:
    """Return the host, and the number of this process."""
    return socket.gethostname(), os.getpid()


def told_from(folder: Path, place: Location) -> str:
    """Return a place as a record in a folder has it: in the folder, from there."""
    if isinstance(place, Path) and folder in place.parents:
        return str(place.relative_to(folder))
    return masked(str(place))


def write_record(folder: Path, record: RunRecord, *, name: str = RECORD) -> None:
    """Write what is known of a run into its folder."""
    text = json.dumps(asdict(record), indent=2)
    write_whole(folder / name, masked(text) + "\n", what="the record of the run", mode=PRIVATE)


def read_record(folder: Path, *, name: str = RECORD) -> RunRecord | None:
    """Return what is known of a run, if a folder is that of one; a damaged record is refused."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    text = read_given(path, what="the record of a run")
    try:
        content = parsed(text)
    except ValueError as error:
        raise _damaged([str(error)], path) from None
    if not isinstance(content, dict) or content.get("written_by") != _MARK:
        return None  # another program's
    try:
        record = _File.model_validate_json(json.dumps({"record": content})).record
    except ValidationError as error:
        raise _damaged(told(error), path) from None
    return record.as_seen_now(folder)


def _damaged(faults: list[str], path: Path) -> InputError:
    fix = "remove it, or bring back a copy; the run's checkpoints need no record"
    return damaged(faults, what="the record of the run was", where=str(path), fix=fix)


def runs_in(folder: Path) -> list[tuple[Path, RunRecord]]:
    """Return the runs in a folder, the oldest first; of those with a damaged record is told."""
    return sorted(_runs_in(folder), key=lambda pair: pair[1].started_at)


def _runs_in(folder: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            record = read_record(path) if path.is_dir() else None
        except AutoparError as error:
            tell_note(f"{path.name} is left out: {str(error).splitlines()[0]} ({error.where})")
            continue
        if record is not None:
            yield path, record


def as_data(record: RunRecord) -> dict[str, object]:
    """Return a record as JSON has it."""
    return asdict(record)
