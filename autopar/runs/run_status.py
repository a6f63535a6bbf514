"""Tells how far a training has come, from the files that it writes and from its scheduler."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import AliasPath, BaseModel, Field, ValidationError

from autopar.planner.cluster.tool_output import fields_in
from autopar.planner.errors import InputError
from autopar.planner.plan.files.document import FILE_NAME as PLAN_NAME
from autopar.planner.plan.files.document import read_plan
from autopar.runs.run_folder import CHECKPOINTS, RUNS
from autopar.runs.run_metrics import last_step, lines_of, steady_steps
from autopar.runs.run_record import METRICS, RunState, read_record, runs_in
from autopar.runtime.checkpointing.claim import is_claimed
from autopar.runtime.checkpointing.finding import checkpoints_in, step_of
from autopar.runtime.ranks.locations import Location, location
from autopar.runtime.ranks.metrics import Event
from autopar.runtime.texts import HIDDEN

_RECENT_LINES = 50
_SECONDS = 60  # time limit for a scheduler's answer
_OF_EVENTS = {
    Event.FINISHED: RunState.FINISHED,
    Event.PREEMPTED: RunState.PREEMPTED,
    Event.STOPPED: RunState.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankStatus:
    """A rank that was slower than the others, at a step."""

    rank: int
    step: int
    what: str
    own_seconds: float
    others_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledJob:
    """A job as its scheduler describes it."""

    name: str
    state: str
    reason: str
    restarts: int
    nodes: str  # a list of nodes from Slurm; "4 Running" from Kubernetes: pods by their phase
    seconds_left: float | None  # to the time limit
    folder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How far a training has come; a field is None if it is not known."""

    folder: str | None
    state: str
    step: int | None = None
    steps: int | None = None
    loss: float | str | None = None
    step_seconds: float | None = None  # the median of recent step lines
    predicted_step_seconds: float | None = None
    against_plan: float | None = None  # the measured step over the predicted one
    seconds_left: float | None = None
    silent_seconds: float | None = None  # since the last line of metrics
    checkpoint_step: int | None = None
    restarts: int = 0
    slow_rank: SlowRankStatus | None = None
    job: ScheduledJob | None = None

    @property
    def is_over(self) -> bool:
        """Whether the training has ended, and no job goes on with it."""
        goes_on = self.job is not None and self.job.state in _NOT_OVER
        return not goes_on and self.state not in (RunState.RUNNING, _NOT_BEGUN)


_NOT_BEGUN = "not begun"
_NOT_OVER = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")


def run_folder(path: Path) -> Path:
    """Return a run's or a job's folder: the given one, or the newest run in it."""
    if (path / METRICS).is_file() or read_record(path) is not None:
        return path
    found = runs_in(path) or runs_in(path / RUNS)
    if found:
        return found[-1][0]
    if (path / PLAN_NAME).is_file():
        return path  # of a job that has not begun
    raise InputError(
        f"there is no run in {path}",
        expected="a folder of `autopar run`, or of a job of `autopar emit --for`",
    )


def run_status(folder: Path | None, job: ScheduledJob | None = None) -> RunStatus:
    """Return the status of the training in a folder, and of its job."""
    if folder is None:
        return RunStatus(folder=None, state="" if job is None else job.state, job=job)
    record = read_record(folder)
    lines = lines_of(folder / METRICS if record is None else record.metrics_in(folder))
    kept = None if record is None else record.checkpoints_in(folder)
    place = folder / CHECKPOINTS if kept is None else kept
    state = _state_of(lines, place) if record is None else str(record.state)
    progress, predicted = _progress(lines), _predicted(folder)
    measured = progress["step_seconds"]
    return RunStatus(
        folder=str(folder),
        state=state,
        predicted_step_seconds=predicted,
        against_plan=measured / predicted if measured and predicted else None,
        checkpoint_step=_checkpoint_step(lines, place),
        job=job,
        **progress,
    )


def _state_of(lines: Sequence[dict[str, Any]], checkpoints: Location) -> str:
    """Return the state of a training without a record, from its last event."""
    if not lines:
        return _NOT_BEGUN
    ended = _OF_EVENTS.get(_last_event(lines))
    if ended is not None:
        return str(ended)
    is_running = is_claimed(checkpoints) if checkpoints.is_dir() else True
    return str(RunState.RUNNING if is_running else RunState.KILLED)


def _last_event(lines: Sequence[dict[str, Any]]) -> Any:
    """Return the last event that begins or ends a training."""
    names = {Event.STARTED, *_OF_EVENTS}
    return next((one["event"] for one in reversed(lines) if one.get("event") in names), None)


def _progress(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a status that follow from lines of metrics."""
    starts = [n for n, one in enumerate(lines) if one.get("event") == Event.STARTED]
    own = lines[starts[-1] :] if starts else lines
    last = last_step(own) or last_step(lines)
    seconds = [float(one["seconds"]) for one in steady_steps(own)[-_RECENT_LINES:]]
    step = None if last is None else int(last["step"])
    steps = own[0].get("steps") if starts else None
    pace = median(seconds) if seconds else None
    left = None
    if pace is not None and step is not None and steps is not None:
        left = (steps - step) * pace
    return {
        "step": step,
        "steps": steps,
        "loss": None if last is None else last.get("loss"),
        "step_seconds": pace,
        "seconds_left": left,
        "silent_seconds": _age(lines),
        "restarts": max(len(starts) - 1, 0),
        "slow_rank": _slow_rank(own),
    }


def _age(lines: Sequence[dict[str, Any]]) -> float | None:
    written = lines[-1].get("time") if lines else None
    return None if written is None else max(0.0, time.time() - float(written))


def _slow_rank(lines: Sequence[dict[str, Any]]) -> SlowRankStatus | None:
    """Return the rank that the metrics last reported as slow since the last start."""
    names = SlowRankStatus.__slots__
    for one in reversed(lines):
        if one.get("event") == Event.SLOW and all(name in one for name in names):
            return SlowRankStatus(**{name: one[name] for name in names})
    return None


def _predicted(folder: Path) -> float | None:
    path = folder / PLAN_NAME
    return read_plan(path).prediction.step_seconds if path.is_file() else None


def _checkpoint_step(lines: Sequence[dict[str, Any]], place: Location) -> int | None:
    """Return the step of the newest checkpoint in `place`, else in the folder that metrics name."""
    kept = (one.get("folder") for one in reversed(lines) if one.get("event") == Event.KEPT)
    named = next((one for one in kept if isinstance(one, str) and HIDDEN not in one), None)
    found = checkpoints_in(place) or (checkpoints_in(location(named)) if named else [])
    return step_of(found[0]) if found else None


def asked(words: Sequence[str], what: str) -> str:
    """Return what a scheduler's command prints, or raise InputError."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise InputError(
            f"there is no command {words[0]} here", fix="run this where jobs are submitted"
        ) from None
    except subprocess.TimeoutExpired:
        raise InputError(f"{words[0]} has not answered in {_SECONDS} s") from None
    if done.returncode:
        printed = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"{words[0]} does not show {what}: {printed[-1][:200] if printed else ''}")
    return done.stdout


def slurm_job(job: str) -> ScheduledJob:
    """Return a job of Slurm; one that has ended long ago is no longer known."""
    if not re.fullmatch(r"\d{1,10}(_\d{1,10})?", job, re.ASCII):
        raise InputError(f"--slurm {job[:40]}", expected="the number of a job")
    return slurm_job_in(asked(["scontrol", "--oneliner", "show", "job", job], f"job {job}"))


def slurm_job_in(text: str) -> ScheduledJob:
    """Return the job that `scontrol --oneliner show job` prints."""
    found = fields_in(text.strip().splitlines()[0] if text.strip() else "")
    if "JobState" not in found:
        raise InputError("scontrol's answer has no JobState")
    limit, run = (_seconds_of(found.get(name, "")) for name in ("TimeLimit", "RunTime"))
    reason = found.get("Reason", "None")
    return ScheduledJob(
        name=found.get("JobName", ""),
        state=found["JobState"],
        reason="" if reason == "None" else reason,
        restarts=int(found["Restarts"]) if found.get("Restarts", "").isdecimal() else 0,
        nodes=found.get("NodeList", ""),
        seconds_left=None if limit is None or run is None else max(limit - run, 0.0),
        folder=found.get("WorkDir"),
    )


_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def _seconds_of(text: str) -> float | None:
    """Return a time as Slurm writes it, "1-02:03:04", in seconds."""
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None  # UNLIMITED, or not begun
    days, hours, minutes, seconds = (int(one or 0) for one in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class _Condition(BaseModel):
    type: str
    status: str
    reason: str = ""


class _JobSet(BaseModel):
    name: str = Field(validation_alias=AliasPath("metadata", "name"))
    conditions: list[_Condition] = Field([], validation_alias=AliasPath("status", "conditions"))
    restarts: int = Field(0, validation_alias=AliasPath("status", "restarts"))


class _Pod(BaseModel):
    phase: str = Field("Unknown", validation_alias=AliasPath("status", "phase"))


class _Pods(BaseModel):
    items: list[_Pod]


def kubernetes_job(name: str, namespace: str | None) -> ScheduledJob:
    """Return the JobSet with this name; a TrainJob has a JobSet, too."""
    if not re.fullmatch(r"[a-z0-9][-a-z0-9.]{0,252}", name):
        raise InputError(f"--kubernetes {name[:40]}", expected="the name of a JobSet or TrainJob")
    if namespace is not None and not re.fullmatch(r"[a-z0-9][-a-z0-9]{0,62}", namespace):
        raise InputError(f"--namespace {namespace[:40]}", expected="the name of a namespace")
    get = ["kubectl", "get", *(("--namespace", namespace) if namespace else ()), "-o", "json"]
    jobset = asked([*get, "jobset", name], f"the JobSet {name}")
    label = f"jobset.sigs.k8s.io/jobset-name={name}"
    return jobset_in(jobset, asked([*get, "pods", "-l", label], f"the pods of {name}"))


def jobset_in(jobset: str, pods: str) -> ScheduledJob:
    """Return the job that kubectl prints as JSON: a JobSet and its pods."""
    try:
        found, own = _JobSet.model_validate_json(jobset), _Pods.model_validate_json(pods)
    except ValidationError as error:
        raise InputError(f"kubectl's answer cannot be read: {error.errors()[0]['msg']}") from None
    phases = [one.phase for one in own.items]
    holding = [one for one in found.conditions if one.status == "True"]
    return ScheduledJob(
        name=found.name,
        state=_jobset_state({one.type: one.reason for one in holding}, phases),
        reason=holding[-1].reason if holding else "",
        restarts=found.restarts,
        nodes=", ".join(f"{phases.count(one)} {one}" for one in dict.fromkeys(phases)),
        seconds_left=None,
        folder=None,
    )


def _jobset_state(conditions: Mapping[str, str], phases: Sequence[str]) -> str:
    """Return a state in Slurm's words."""
    for kind, state in (("Completed", "COMPLETED"), ("Failed", "FAILED"), ("Suspended", "PENDING")):
        if kind in conditions:
            return state
    return "RUNNING" if "Running" in phases and "Pending" not in phases else "PENDING"
