"""Reads and writes the record of a run, and plans its training for other devices."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.codegen.script.render import FILE_NAME as SCRIPT_NAME
from autopar.codegen.script.render import is_of_another_plan, is_unchanged
from autopar.console import print_note
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.files import SomeSeconds, damaged, read_given, validation_messages, write_whole
from autopar.planner.model.model_file import model_path
from autopar.planner.plan.again import machines_like, resized_constraints
from autopar.planner.plan.files.document import FILE_NAME, read_plan, write_plan
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.traced import check_unchanged, model_spec
from autopar.runtime.checkpointing.claim import is_claimed
from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.metrics import parsed
from autopar.runtime.texts import masked

RECORD = "run.json"
METRICS = "metrics.jsonl"
PRIVATE = 0o600  # mode of files that contain the command of a run
_MARK = "autopar"
_MOST_CHARACTERS = 100_000
_HIDDEN = "***"
Time = Annotated[float, Ge(0), Le(2e11)]  # seconds since 1970, before the year 8000


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"  # stopped by a signal, with a checkpoint to resume from
    INTERRUPTED = "interrupted"  # stopped by a signal, without a checkpoint
    KILLED = "killed"  # `autopar run` itself was killed


EXIT_CODES = {
    RunState.FINISHED: ExitCode.DONE,
    RunState.FAILED: ExitCode.TRAINING_FAILED,
    RunState.PREEMPTED: ExitCode.PREEMPTED,
    RunState.INTERRUPTED: ExitCode.INTERRUPTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The contents of run.json. Paths in the run's folder are relative: the folder may be moved."""

    written_by: str = _MARK
    name: str
    model: str  # path.py:factory
    arguments: tuple[tuple[str, str], ...]
    plan: str  # in words
    predicted_step_seconds: SomeSeconds
    command: str
    checkpoints: str | None  # None if the script or its arguments name the folder
    metrics: str
    goes_on_from: str | None = None
    host: str
    process: int
    started_at: Time
    ended_at: Time | None = None
    state: RunState = RunState.RUNNING
    why: str | None = None  # why the run failed

    def metrics_in(self, folder: Path) -> Path:
        """Return the metrics file of the run in this folder."""
        return folder / self.metrics

    def checkpoints_in(self, folder: Path) -> Location | None:
        """Return the checkpoints folder of the run in this folder."""
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
        """Return the record, with the state KILLED if the run's process has gone."""
        is_gone = self.state is RunState.RUNNING and not is_claimed(folder)
        return replace(self, state=RunState.KILLED) if is_gone else self


class _RecordFile(BaseModel):
    """Applies pydantic's strictness to the dataclass: no coercion, no unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, str_max_length=_MOST_CHARACTERS
    )

    record: RunRecord


def own_process() -> tuple[str, int]:
    """Return the host's name and this process's id."""
    return socket.gethostname(), os.getpid()


def relative_to_folder(folder: Path, place: Location) -> str:
    """Return a path as text, relative to the run's folder if it is inside."""
    if isinstance(place, Path) and folder in place.parents:
        return str(place.relative_to(folder))
    return masked(str(place))


def write_record(folder: Path, record: RunRecord, *, name: str = RECORD) -> None:
    """Write a run's record into its folder."""
    text = json.dumps(asdict(record), indent=2)
    write_whole(folder / name, masked(text) + "\n", what="the record of the run", mode=PRIVATE)


def read_record(folder: Path, *, name: str = RECORD) -> RunRecord | None:
    """Return a run's record, or None if the folder is not a run's; raise if it is damaged."""
    path = folder / name
    if not os.path.lexists(path):
        return None
    text = read_given(path, what="the record of a run")
    try:
        content = parsed(text)
    except ValueError as error:
        raise _damaged([str(error)], path) from None
    if not isinstance(content, dict) or content.get("written_by") != _MARK:
        return None  # another program's file
    try:
        record = _RecordFile.model_validate_json(json.dumps({"record": content})).record
    except ValidationError as error:
        raise _damaged(validation_messages(error), path) from None
    return record.as_seen_now(folder)


def _damaged(faults: list[str], path: Path) -> InputError:
    fix = "remove it, or bring back a copy; the run's checkpoints need no record"
    return damaged(faults, what="the record of the run was", where=str(path), fix=fix)


def runs_in(folder: Path) -> list[tuple[Path, RunRecord]]:
    """Return the runs in a folder, the oldest first; prints a note about damaged records."""
    return sorted(_runs_in(folder), key=lambda pair: pair[1].started_at)


def _runs_in(folder: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            record = read_record(path) if path.is_dir() else None
        except AutoparError as error:
            print_note(f"{path.name} is left out: {str(error).splitlines()[0]} ({error.where})")
            continue
        if record is not None:
            yield path, record


_LONGEST_SECONDS = 1800  # limit for another machine to plan
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanToTrain:
    """A plan to train with, its path, and the path of its script."""

    plan: StoredPlan
    file: Path
    script: Path
    text: str | None = None  # of the script; None if script and plan are already written

    @classmethod
    def read(cls, path: Path) -> PlanToTrain:
        """Return the plan in a file, or in plan.json of a folder, with the script beside it."""
        file = path / FILE_NAME if path.is_dir() else path
        return cls(plan=read_plan(file), file=file, script=file.parent / SCRIPT_NAME)

    @property
    def source(self) -> str:
        """The text of the script."""
        return read_given(self.script, what="the script") if self.text is None else self.text

    def refuse_another_plan(self) -> None:
        """Raise if the script was written from another plan."""
        if is_of_another_plan(self.source, self.plan):
            raise AutoparError(
                "the script was not written from this plan, or the plan was changed since",
                where=f"{self.script} and {self.file}",
                fix=f"write it anew: autopar emit {self.file}; or bring the plan back",
                exit_code=ExitCode.MISMATCH,
            )

    def write(self) -> None:
        """Write script and plan; the plan comes last, because other machines wait for it."""
        if self.text is not None:
            write_whole(self.script, self.text, what="the script")
            write_plan(self.plan, self.file)


def planned_in_advance(current: PlanToTrain, devices: int) -> PlanToTrain | None:
    """Return a plan of the same training for `devices` devices that was made in advance, or None.

    Its folder has the name of the folder of `current`, and the number: `out-4` beside `out`.
    """
    folder = _folder_ahead(current, devices)
    found = _written_in(folder)
    if found is not None and (unlike := _differences(current, devices, found)):
        print_note(f"the plan in {folder} is not taken: it has another {', another '.join(unlike)}")
        return None
    return found


def left_in(folder: Path, current: PlanToTrain, devices: int, machines: int) -> PlanToTrain | None:
    """Return the plan that an earlier start left in the folder, if it fits this training."""
    found = _written_in(folder)
    if found is None or _differences(current, devices, found):
        return None
    return found if len(found.plan.cluster.nodes) == machines else None


def awaited(current: PlanToTrain, devices: int, folder: Path, machines: int) -> PlanToTrain:
    """Wait for the first machine's plan in the run's folder, and return it."""
    print_note(f"waiting for the plan for {devices} devices that the first machine makes")
    until = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < until:
        if (found := left_in(folder, current, devices, machines)) is not None:
            return found
        time.sleep(_POLL_SECONDS)
    raise InputError(
        f"the first machine has left no plan for {devices} devices within {_LONGEST_SECONDS} s",
        where=str(folder / FILE_NAME),
        expected="a folder that all machines see, and this command on the first one, too",
        fix="plan ahead: autopar plan … --gpus N --nodes M -o FOLDER; then autopar run FOLDER",
    )


def _written_in(folder: Path) -> PlanToTrain | None:
    is_there = (folder / FILE_NAME).is_file() and (folder / SCRIPT_NAME).is_file()
    return PlanToTrain.read(folder) if is_there else None


def _differences(current: PlanToTrain, devices: int, found: PlanToTrain) -> list[str]:
    """Return the facts in which a found plan differs from this training on `devices` devices."""
    facts, needed = _facts(found.plan), {**_facts(current.plan), "number of devices": devices}
    return [word for word, fact in needed.items() if facts[word] != fact]


def _folder_ahead(current: PlanToTrain, devices: int) -> Path:
    folder = current.file.parent.resolve()
    return folder.parent / f"{folder.name}-{devices}"


def _facts(plan: StoredPlan) -> dict[str, object]:
    """Return facts that identify a training, by their names in messages."""
    return {
        "model": (plan.model.source_hash, plan.model.arguments),
        "global batch": plan.arrangement.global_batch,
        "precision": plan.arrangement.precision,
        "number of devices": plan.arrangement.ranks,
    }


def planned_again(
    current: PlanToTrain, devices: int, folder: Path, machines: int = 1
) -> PlanToTrain:
    """Return the best plan of the same training on `devices` devices of `machines` machines.

    The plan and its script are to be written into `folder`.
    """
    # imported here, because it takes seconds
    from autopar.planning import Request, scripted

    plan, beside = current.plan, current.file.parent
    if not is_unchanged(current.source):
        raise InputError(
            f"the script was changed by hand; a new one for {devices} devices would lack that",
            where=str(current.script),
            fix=f"plan into {_folder_ahead(current, devices)} (autopar plan … --gpus {devices} -o) "
            "and change the script there: then it is used",
        )
    spec = model_spec(plan, beside)
    check_unchanged(plan, model_path(spec))
    resized = resized_constraints(plan, devices)
    if resized.dropped:
        dropped = ", ".join(map(str, resized.dropped))
        print_note(f"dropped from the constraints of the plan for --gpus {devices}: {dropped}")
    request = Request(
        model=spec,
        arguments=tuple(f"{name}={value}" for name, value in plan.model.arguments),
        clusters=(machines_like(plan, devices, machines),),
        constraints=resized.constraints,
        looks_at_fewer=False,
    )
    made, text = scripted(request, folder / SCRIPT_NAME)
    # --resume auto finds the runs of a model by the spec of its first plan.
    found = replace(made.plan, model=replace(made.plan.model, spec=plan.model.spec))
    return PlanToTrain(plan=found, file=folder / FILE_NAME, script=folder / SCRIPT_NAME, text=text)
