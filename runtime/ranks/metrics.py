"""Turns what happens to a training into lines of JSON, which the first rank adds to a file."""

from __future__ import annotations

import json
import math
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.curves import Curves
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.refusal import refuse


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

    def __init__(self, path: Path | None, mesh: Mesh, curves: Curves) -> None:
        self._curves = curves
        self._path = path.resolve() if path is not None and mesh.rank == 0 else None
        if self._path is None or mesh.is_dry_run:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as error:
            refuse(
                f"nothing can be written to {self._path}: {error.strerror}",
                fix="name another file with --metrics",
            )

    def add(self, **fields: Any) -> None:
        """Add a line with the time; a disk that is full does not end a training."""
        self._curves.add(fields)
        if self._path is None:
            return
        line = json.dumps({"time": round(time.time(), 3), **_as_json(fields)})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"note: {self._path} has not got this line: {error.strerror}")


def _as_json(value: Any) -> Any:
    """Return fields as every reader of JSON takes them: nan and inf, which it lacks, as text."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
