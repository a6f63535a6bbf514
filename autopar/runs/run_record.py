"""Turns a run into run.json of its folder, and back: when, what, where, how it ended."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from autopar.planner.destination import write_whole
from autopar.planner.errors import ExitCode
from autopar.planner.given import read_given

RECORD = "run.json"
METRICS = "metrics.jsonl"
_MARK = "autopar"


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
    """What run.json says."""

    written_by: str = _MARK
    name: str
    model: str  # path.py:factory
    arguments: tuple[tuple[str, str], ...]
    plan: str  # in words
    predicted_step_seconds: float
    command: str
    checkpoints: str | None  # the folder, None where the script itself was told one
    metrics: str
    goes_on_from: str | None = None
    host: str
    process: int
    process_began: int | None  # ticks since the host booted, where that is known
    started_at: float
    ended_at: float | None = None
    state: RunState = RunState.RUNNING

    @property
    def is_running(self) -> bool:
        """Whether it still runs, as far as this host can tell."""
        if self.state is not RunState.RUNNING or self.host != socket.gethostname():
            return self.state is RunState.RUNNING
        return _began(self.process) == self.process_began and _is_alive(self.process)

    def as_seen_now(self) -> RunRecord:
        """Return it with what has become of it, where its process could not say so."""
        is_gone = self.state is RunState.RUNNING and not self.is_running
        return replace(self, state=RunState.KILLED) if is_gone else self


def own_process() -> tuple[str, int, int | None]:
    """Return the host, the number of this process, and when it began."""
    return socket.gethostname(), os.getpid(), _began(os.getpid())


def write_record(folder: Path, record: RunRecord, *, name: str = RECORD) -> None:
    """Write what is known of a run into its folder."""
    text = TypeAdapter(RunRecord).dump_json(record, indent=2).decode()
    write_whole(folder / name, text + "\n", what="the record of the run")


def read_record(folder: Path) -> RunRecord | None:
    """Return what is known of a run, if a folder is that of one."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = TypeAdapter(RunRecord).validate_json(read_given(path, what="the record of a run"))
    except ValidationError:
        return None
    return record.as_seen_now() if record.written_by == _MARK else None


def runs_in(folder: Path) -> list[tuple[Path, RunRecord]]:
    """Return the runs in a folder, the oldest first."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        record = read_record(path) if path.is_dir() else None
        if record is not None:
            found.append((path, record))
    return sorted(found, key=lambda pair: pair[1].started_at)


def as_data(record: RunRecord) -> dict[str, object]:
    """Return a record as JSON has it."""
    return asdict(record)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _began(process: int) -> int | None:
    """Return when a process began: its number may be that of another one by now."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
