"""Turns what happens to a training into lines of JSON, which the first rank adds to a file."""

from __future__ import annotations

import json
import math
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.curves import Curves
from autopar.runtime.ranks.locations import Location, head_of
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.outputs import refuse_no_file
from autopar.runtime.ranks.records import parsed
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.shown import masked

_BEGINNING = b'{"time": '
_LONGEST_LINE = 2**20


class Event(StrEnum):
    """What a line tells that is no line of a step."""

    STARTED = "started"
    EVALUATED = "evaluated"
    KEPT = "kept"
    SLOW = "slow"
    PROFILED = "profiled"
    STOPPED_EARLY = "stopped early"
    PREEMPTED = "preempted"
    STOPPED = "stopped"
    FINISHED = "finished"


class Metrics:
    """The file of --metrics, and curves; where none is asked for, nothing is written.

    A line is added as a whole, so that a training that is killed leaves whole lines but the last.
    """

    def __init__(
        self, path: Path | None, mesh: Mesh, curves: Curves, *, beside: Location | None = None
    ) -> None:
        self._curves = curves
        self._path = path.resolve() if path is not None and mesh.rank == 0 else None
        if self._path is None or mesh.is_dry_run:
            return
        fix = "name another file with --metrics"
        refuse_no_file(self._path, option="--metrics", fix=fix, beside=beside)
        try:
            if self._path.exists() and not _has_metrics(self._path):
                found = f"--metrics: {self._path} has no lines of metrics, and none are added to it"
                refuse(found, fix=fix)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() and not _ends_in_a_line(self._path):  # a training was killed
                    file.write(b"\n")
        except OSError as error:
            refuse(f"nothing can be written to {self._path}: {error.strerror}", fix=fix)

    def add(self, **fields: Any) -> None:
        """Add a line with the time; a disk that is full does not end a training."""
        self._curves.add(fields)
        if self._path is None:
            return
        line = masked(json.dumps({"time": round(time.time(), 3), **_as_json(fields)}))
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"note: {self._path} has not got this line: {error.strerror}")


def is_metrics_line(line: str | bytes) -> bool:
    """Whether a line is one of a training."""
    try:
        found = parsed(line)
    except ValueError:
        return False
    if not isinstance(found, dict) or type(found.get("time")) not in (int, float):
        return False
    return found["event"] in set(Event) if "event" in found else "step" in found


def _has_metrics(path: Path) -> bool:
    """Whether a file is empty, or begins with a line of a training, which a kill may have cut."""
    lines = head_of(path, _LONGEST_LINE).split(b"\n")
    if lines[0].startswith(_BEGINNING) and not _is_json(lines[0]):
        lines = lines[1:]
    return lines in ([], [b""]) or is_metrics_line(lines[0])


def _is_json(line: bytes) -> bool:
    try:
        parsed(line)
    except ValueError:
        return False
    return True


def _ends_in_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _as_json(value: Any) -> Any:
    """Return fields as every reader of JSON takes them: nan and inf, which it lacks, as text."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
