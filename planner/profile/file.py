"""Reads and writes measured.toml, and refuses what holds no sound measurements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from autopar.planner.cluster.toml_text import parsed
from autopar.planner.destination import write_whole
from autopar.planner.errors import InputError
from autopar.planner.given import read_given
from autopar.planner.profile.measured import MeasuredFile
from autopar.planner.written import check_format, damaged, is_written, told
from autopar.version import __version__

FILE_NAME = "measured.toml"
FORMAT = 7
_EXPECTED = f"a {FILE_NAME} as `autopar profile` writes it"
_AGAIN = "measure again with `autopar profile`"


class _File(BaseModel):
    """The settings of pydantic reach the dataclasses in it: nothing coerced, nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    format: int
    autopar: str
    written: str
    measured: MeasuredFile


def read_measurements(path: Path) -> MeasuredFile:
    """Return the measurements in a file."""
    source = read_given(path, what="the measurements file", expected=_EXPECTED, fix=_AGAIN)
    return parse_measurements(source, where=str(path))


def parse_measurements(source: str, *, where: str) -> MeasuredFile:
    """Return the measurements that a text holds; `where` names the text in messages."""
    table = dict(_table(source, where))
    envelope = {key: table.pop(key, None) for key in ("format", "autopar", "written")}
    try:
        text = json.dumps({**envelope, "measured": table}, default=lambda _: None)
        measured = _File.model_validate_json(text).measured
    except ValidationError as error:
        raise _damaged(told(error), where) from None
    faults = list(_faults(measured))
    if faults:
        raise _damaged(faults, where)
    return measured


def _table(source: str, where: str) -> Mapping[str, Any]:
    try:
        table = parsed(source, where=where)
    except InputError as error:
        raise InputError(
            f"the measurements are damaged or cut off: {error.found}",
            where=error.where,
            expected=_EXPECTED,
            fix=_AGAIN,
        ) from None
    if not is_written(table):
        raise InputError("this TOML file holds no measurements", where=where, expected=_EXPECTED)
    check_format(table, FORMAT, what="these measurements", where=where, fix=_AGAIN)
    return table


def _faults(measured: MeasuredFile) -> Iterator[str]:
    for one in (collective for net in measured.nets for collective in net.collectives):
        rises = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(one.points))
        if not one.points or not rises:
            yield f"nets.collectives: payloads and seconds of {one.collective} do not rise"


def _damaged(faults: list[str], where: str) -> InputError:
    return damaged(faults, what="the measurements were", where=where, fix=_AGAIN)


def write_measurements(measured: MeasuredFile, path: Path) -> None:
    """Write measurements into a file."""
    text = measurements_text(measured, written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))
    write_whole(path, text, what="the measurements file")


def content_hash(measured: MeasuredFile) -> str:
    """Return 64 hexadecimal digits, the same for equal figures whenever they were written."""
    return hashlib.sha256(measurements_text(measured, written="").encode()).hexdigest()


def measurements_text(measured: MeasuredFile, *, written: str) -> str:
    """Return the text of measured.toml: a table for each host, net and op, its figures in lines."""
    lines = [
        "# What `autopar profile` measured; figures stand in for autopar's formulas. Runs add up.",
        f"format = {FORMAT}",
        f"autopar = {_toml(__version__)}",
        f"written = {_toml(written)}",
    ]
    for section, tables in _ADAPTER.dump_python(measured, mode="json").items():
        for table in tables:
            lines += ["", f"[[{section}]]"]
            lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """Return a value in TOML; the texts, numbers and truths of JSON are TOML's too."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


_ADAPTER = TypeAdapter(MeasuredFile)
