"""Finds why the ranks of a run have left, in what each of them leaves beside its logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.planner.errors import ExitCode, InputError
from autopar.planner.given import read_given
from autopar.runtime.ranks.leaving import VERDICT

_LOGS = ("stdout.log", "stderr.log")  # a rank prints all to the first, once it has begun
_COARSE_SECONDS = 1.0  # by which the time of a file may be before that of the clock
_END_BYTES = 2**17  # of a log
_ATTEMPT = re.compile(r"attempt_(\d{1,6})")
_RAISED = re.compile(r"(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)")
_TRACEBACK = "Traceback (most recent call last):"


class Left(BaseModel):
    """What a rank left behind: why, with which code, and when."""

    model_config = ConfigDict(strict=True, frozen=True, str_max_length=10_000)

    time: float
    code: int
    found: str
    fix: str

    @property
    def exit_code(self) -> ExitCode:
        """The code, if it is one of those that scripts leave with."""
        known = (ExitCode.USAGE, ExitCode.MISMATCH)
        return ExitCode(self.code) if self.code in known else ExitCode.TRAINING_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The folders of the ranks of the last attempt, as torchrun makes them."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, logs: Path, *, since: float) -> Ranks:
        """Return the ranks of all machines that were started since a time."""
        return cls(folders=tuple(_last_ranks(logs, since)))

    def verdict(self) -> Left | None:
        """Return what the first rank that left has said, if any has."""
        said = [one for folder in self.folders if (one := _read(folder / VERDICT)) is not None]
        return min(said, key=lambda one: one.time, default=None)

    def raised(self) -> str:
        """Return what the first rank that failed has raised, in a line; "" where none is seen."""
        logs = [folder / name for folder in self.folders for name in _LOGS]
        ended = sorted((one for one in logs if one.is_file()), key=lambda one: one.stat().st_mtime)
        return next((line for log in ended if (line := _raised_in(log))), "")


def _last_ranks(logs: Path, since: float) -> Iterator[Path]:
    for run in logs.iterdir() if logs.is_dir() else ():
        attempts = [
            (int(found[1]), one) for one in run.glob("*") if (found := _ATTEMPT.fullmatch(one.name))
        ]
        if attempts and max(attempts)[1].stat().st_mtime >= since - _COARSE_SECONDS:
            yield from (one for one in sorted(max(attempts)[1].iterdir()) if one.is_dir())


def _read(path: Path) -> Left | None:
    if not path.is_file():
        return None
    try:
        return Left.model_validate_json(read_given(path, what="what a rank left"))
    except (InputError, ValidationError):
        return None


def _raised_in(log: Path) -> str:
    """Return the last line of the last traceback in a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _END_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    begun = next((n for n in range(len(lines) - 1, -1, -1) if _TRACEBACK in lines[n]), None)
    if begun is None:
        return ""
    return next((found[1] for line in lines[begun:] if (found := _RAISED.fullmatch(line))), "")
