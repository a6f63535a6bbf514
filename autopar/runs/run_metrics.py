"""Turns the file of --metrics into its steps and events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.planner.errors import InputError

_END_BYTES = 2**16  # in which the last step of a run is


def lines_of(path: Path, *, start: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a file from a byte on; the last one may be cut off, and is left out."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    found = []
    for line in content.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            found.append(one)
    return found


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines at the end of a file."""
    size = path.stat().st_size if path.is_file() else 0
    return lines_of(path, start=max(0, size - _END_BYTES))


def last_step(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the last step."""
    return next((one for one in reversed(lines) if "event" not in one and "step" in one), None)


def last_event(lines: Sequence[dict[str, Any]]) -> str | None:
    """Return the last thing that happened, if it was no step."""
    return lines[-1].get("event") if lines else None
