"""Turns the file of --metrics into its steps and events, and tells lines that are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.planner.errors import InputError
from autopar.planner.numbers import Bytes, Figure, Seconds, SomeSeconds
from autopar.planner.written import damaged
from autopar.runtime.ranks.metrics import Event
from autopar.runtime.ranks.option_values import MOST_STEPS
from autopar.runtime.ranks.records import parsed

_END_BYTES = 2**16  # in which the last step of a run is
_MOST_BYTES = 2**30
Step = Annotated[int, Ge(0), Le(MOST_STEPS)]
Rank = Annotated[int, Ge(0), Le(2**31)]
Reading = float | str | None  # nan and inf are texts


class _Record(BaseModel):
    """What both kinds of line have. Lines of later versions may have more."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, str_max_length=100_000
    )

    time: Annotated[float, Ge(0)] | None = None


class StepRecord(_Record):
    """What is told of some steps."""

    step: Step
    loss: Reading = None
    gradient_norm: Reading = None
    learning_rate: Reading = None
    seconds: SomeSeconds | None = None
    per_second: Reading = None
    unit: str = "rows"
    memory_bytes: Bytes | None = None
    mfu: Figure | None = None
    against_plan: Figure | None = None
    seconds_left: Reading = None


class _RankRecord(_Record):
    """What a rank did in the step that was profiled."""

    pipeline_rank: Rank
    compute_seconds: Seconds
    step_seconds: Seconds
    memory_bytes: Bytes | None = None


class EventRecord(_Record):
    """What happened."""

    event: str
    step: Step | None = None
    why: str | None = None


class _KeptRecord(EventRecord):
    seconds: Seconds
    waited_seconds: Seconds | None = None


class _ProfiledRecord(EventRecord):
    step: Step
    ranks: list[_RankRecord]


_KINDS: dict[str, type[EventRecord]] = {
    Event.KEPT: _KeptRecord,
    Event.PROFILED: _ProfiledRecord,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The lines of a file that are as they should be, and what is wrong with the others."""

    found: tuple[dict[str, Any], ...]
    faults: tuple[str, ...]


def read_lines(path: Path, *, start: int = 0) -> Lines:
    """Read a file from a byte on; lines that a kill has cut off are left out."""
    found, faults = [], []
    for number, line in enumerate(_content(path, start).splitlines(), start=1):
        try:
            one = parsed(line)
        except ValueError:
            continue
        fault = _fault(one)
        if fault:
            faults.append(f"line {number}: {fault}")
        else:
            found.append(one)
    return Lines(found=tuple(found), faults=tuple(faults))


def lines_of(path: Path, *, start: int = 0) -> Sequence[dict[str, Any]]:
    """Return the lines of a file from a byte on, but for those that are no metrics."""
    return read_lines(path, start=start).found


def sound_lines_of(path: Path) -> Sequence[dict[str, Any]]:
    """Return the lines of a file, all of which are metrics."""
    lines = read_lines(path)
    if lines.faults:
        fix = "remove these lines, or bring back a copy"
        raise damaged(lines.faults, what="the metrics were", where=str(path), fix=fix)
    return lines.found


def _content(path: Path, start: int) -> bytes:
    if not _is_there(path):
        return b""
    try:
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path} has more than {_MOST_BYTES} bytes of metrics")
    return content


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, which a damaged record may have
        return False


def _fault(line: object) -> str:
    """Return what is wrong with a line, if anything."""
    if not isinstance(line, dict):
        return "no object"
    kind: type[_Record] = StepRecord
    if "event" in line:
        kind = _KINDS.get(str(line["event"]), EventRecord)
    elif "step" not in line:
        return "neither a step nor an event"
    try:
        kind.model_validate(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


def last_lines(path: Path) -> Sequence[dict[str, Any]]:
    """Return the lines at the end of a file."""
    size = path.stat().st_size if _is_there(path) else 0
    return lines_of(path, start=max(0, size - _END_BYTES))


def last_step(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the line of the last step."""
    return next((one for one in reversed(lines) if "event" not in one), None)


def last_event(lines: Sequence[dict[str, Any]]) -> str | None:
    """Return the last thing that happened, if it was no step."""
    return lines[-1].get("event") if lines else None


def has_finished(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the last start has trained to its end."""
    return any(one == Event.FINISHED for one in _events_of_last_start(lines))


def _events_of_last_start(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    for one in reversed(lines):
        if one.get("event") == Event.STARTED:
            return
        if "event" in one:
            yield one["event"]
