"""Writes the metrics of a training, as lines of a file and as curves.

Also parses untrusted JSON into frozen dataclasses; an error says which value does not fit its
field. Commands use pydantic for this; scripts depend on torch alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.runtime.ranks.leaving import refuse, say
from autopar.runtime.ranks.locations import Location, head_of, refuse_no_file, refuse_no_folder
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.texts import in_a_line, masked

MOST_CHARACTERS = 100_000  # of one string
_SHOWN_CHARACTERS = 40
_LARGEST = 2**60  # of bytes, elements, rows: more than any machine has
_Record = TypeVar("_Record")


class NotARecordError(ValueError):
    """A value does not fit its field; the text names the field."""


@dataclass(frozen=True, slots=True)
class Check:
    """A condition on a value beyond its type, in words and as a function."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Named:
    """The values that a field may have, by their names in JSON; `words` describe them."""

    words: str
    values: Mapping[str, Any]


Count: TypeAlias = Annotated[int, Check("0 or more", lambda count: 0 <= count <= _LARGEST)]


def parsed(text: str | bytes) -> Any:
    """Parse JSON; every invalid text raises ValueError, too deep nesting as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def record(kind: type[_Record], value: Any, *, where: str = "") -> _Record:
    """Turn a JSON value into a dataclass; `where` is the value's path, for messages."""
    made: _Record = _made(kind, value, where)
    return made


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        check = arguments[1]
        if isinstance(check, Named):
            if not isinstance(value, str) or value not in check.values:
                raise _not(check.words, value, where)
            return check.values[value]
        made = _made(arguments[0], value, where)
        if not check.holds(made):
            raise _not(check.words, value, where)
        return made
    if origin in (UnionType, Union):
        return _one_of(arguments, value, where)
    if origin is tuple and isinstance(value, list):
        return _made_tuple(arguments, value, where)
    if hasattr(origin, "__mro__") and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _not("an object", value, where)
        return {key: _made(arguments[1], one, _inside(where, key)) for key, one in value.items()}
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _made_dataclass(kind, value, where)
    return _plain(kind, value, where)


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return a value as one of several types; 3 stays an int if int is allowed."""
    refused = NotARecordError(where)
    for kind in sorted(kinds, key=lambda one: (one is not NoneType, one is float)):
        try:
            return _made(kind, value, where)
        except NotARecordError as error:
            refused = error
    raise refused


def _made_tuple(kinds: tuple[Any, ...], value: list[Any], where: str) -> tuple[Any, ...]:
    if kinds[-1] is ...:
        return tuple(_made(kinds[0], one, f"{where}.{n}") for n, one in enumerate(value))
    if len(kinds) != len(value):
        raise _not(f"a list of {len(kinds)}", value, where)
    pairs = zip(kinds, value, strict=True)
    return tuple(_made(kind, one, f"{where}.{n}") for n, (kind, one) in enumerate(pairs))


def _made_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _not("an object", value, where)
    asked = _fields_of(kind)
    for name in value:
        if name not in asked:
            raise NotARecordError(f"{_inside(where, name)}: there is no such field")
    for name, (_, has_default) in asked.items():
        if name not in value and not has_default:
            raise NotARecordError(f"{_inside(where, name)} is missing")
    given = {name: _made(asked[name][0], one, _inside(where, name)) for name, one in value.items()}
    return kind(**given)


@cache
def _fields_of(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the fields of a dataclass: the type of each, and whether it is optional."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        one.name: (hints[one.name], (one.default, one.default_factory) != (MISSING, MISSING))
        for one in fields(kind)
    }


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) in (int, float):
        with suppress(OverflowError):  # an int too large for a float
            if math.isfinite(number := float(value)):
                return number
    if kind in (bool, int, str, NoneType) and type(value) is kind:
        if kind is str and len(value) > MOST_CHARACTERS:
            raise _not(f"at most {MOST_CHARACTERS:,} characters", value, where)
        return value
    words = {bool: "true or false", int: "a whole number", str: "a text", NoneType: "null"}
    raise _not(words.get(kind, "a finite number" if kind is float else "a list"), value, where)


def _inside(where: str, name: str) -> str:
    shown = in_a_line(name)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}…"
    return f"{where}.{shown}" if where else shown


def _not(words: str, value: Any, where: str) -> NotARecordError:
    shown = repr(value)[:_SHOWN_CHARACTERS]
    return NotARecordError(f"{where}: {shown} is not {words}")


_NO_CURVES = ("step", "unit", "seconds_left")


class Curves:
    """Writes the curves of --tensorboard, if that is given.

    Points that an earlier run wrote for steps after `begun` are hidden.
    """

    def __init__(
        self, folder: Path | None, mesh: Mesh, *, begun: int, beside: Location | None = None
    ) -> None:
        self._folder = folder
        self._writer: Any = None
        if folder is None or mesh.rank != 0 or mesh.is_dry_run:
            return
        fix = "name another folder with --tensorboard"
        refuse_no_folder(folder, option="--tensorboard", fix=fix, beside=beside)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            refuse(
                f"--tensorboard needs a package that cannot be imported: {error}",
                fix="pip install tensorboard, or train without --tensorboard",
            )
        try:
            self._writer = SummaryWriter(str(folder), purge_step=begun + 1)
        except OSError as error:
            refuse(
                f"nothing can be written to {folder}: {error.strerror}",
                fix=fix,
            )

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add the figures of a log line to the curves; a full disk does not end the training."""
        if self._writer is None:
            return
        try:
            for name, value in _points(fields):
                self._writer.add_scalar(name, value, fields["step"])
            self._writer.flush()  # so that nothing is lost if the training is killed
        except OSError as error:
            say(f"note: {self._folder} gets no further figures: {error.strerror}")
            self._writer = None


def _points(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of a step line or an evaluation; other events have none."""
    if "event" not in fields:
        figures = {name: value for name, value in fields.items() if name not in _NO_CURVES}
        yield from ((f"training/{n}", value) for n, value in figures.items() if value is not None)
    elif "metrics" in fields:
        yield "evaluation/loss", fields["loss"]
        yield from ((f"evaluation/{name}", value) for name, value in fields["metrics"].items())


_BEGINNING = b'{"time": '
_LONGEST_LINE = 2**20


PROFILES = "profile"  # the folder beside the metrics, with STEP/rank-N.json and .trace.json.gz


class Event(StrEnum):
    """The kind of a line of --metrics that is not a step line."""

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
    """Writes the lines of --metrics and curves, if these are given.

    Each line is written in one call. After a kill, at most the last line is incomplete.
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
                found = f"--metrics: {self._path} has no lines of metrics, so it is left alone"
                refuse(found, fix=fix)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() and not _ends_in_a_line(self._path):  # cut by a kill
                    file.write(b"\n")
        except OSError as error:
            refuse(f"nothing can be written to {self._path}: {error.strerror}", fix=fix)

    def add(self, **fields: Any) -> None:
        """Add a line with the time; a full disk does not end the training."""
        self._curves.add(fields)
        if self._path is None:
            return
        line = masked(json.dumps({"time": round(time.time(), 3), **as_json(fields)}))
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"note: a line could not be added to {self._path}: {error.strerror}")


def is_metrics_line(line: str | bytes) -> bool:
    """Whether a line was written by a training."""
    try:
        found = parsed(line)
    except ValueError:
        return False
    if not isinstance(found, dict) or type(found.get("time")) not in (int, float):
        return False
    return found["event"] in set(Event) if "event" in found else "step" in found


def _has_metrics(path: Path) -> bool:
    """Whether a file is empty or begins with a line of metrics, possibly cut by a kill."""
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


NOT_FINITE = ("inf", "-inf", "nan")


def as_json(value: Any) -> Any:
    """Return a value, or fields, with nan and inf as strings, because JSON has neither."""
    if isinstance(value, dict):
        return {name: as_json(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
