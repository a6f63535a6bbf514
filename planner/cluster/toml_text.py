"""Turns the text of a TOML file into a table, or says where it is none and what to write."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from autopar.planner.errors import InputError

_PLACE = re.compile(r"(?P<fault>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)")
_BARE_TEXT = re.compile(r"\s*(?P<key>[\w.-]+)\s*=\s*(?P<text>\w[^\"'#,\[\]{}]*?)\s*(#.*)?")
_FIXES = (  # what tomllib says → what to do
    ("Cannot overwrite a value", "the key stands there before: leave one of the two out"),
    ("Cannot declare", "the section stands there before: put all of its keys below one header"),
    ("Expected '=' after a key", "write it as key = value"),
    ("Expected ']'", "close the bracket"),
)
_ELSE = "write key = value, where texts stand in quotes that are closed in the same line"


def parsed(source: str, *, where: str) -> Mapping[str, Any]:
    """Return the table that a text is; `where` names the text in messages."""
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        told = _PLACE.fullmatch(str(error))
        if told is None:  # at the end: something was opened and is not closed
            raise InputError(
                f"not a valid TOML file: {error}",
                where=where,
                fix="close the quote or bracket that is open",
            ) from None
        line = source.split("\n")[int(told["line"]) - 1].strip()
        raise InputError(
            f"not a valid TOML file: {told['fault']}",
            where=f"{where}, line {told['line']}, column {told['column']}: {line}",
            fix=_fix(told["fault"], line),
        ) from None
    except RecursionError:
        raise InputError("the TOML file is nested too deeply", where=where) from None
    except ValueError as error:  # Python reads no whole numbers of so many digits
        raise InputError(f"not a valid TOML file: {error}", where=where, fix=_ELSE) from None


def _fix(fault: str, line: str) -> str:
    known = next((fix for telling, fix in _FIXES if fault.startswith(telling)), "")
    bare = _BARE_TEXT.fullmatch(line)
    if not known and bare:
        return f'texts need quotes: {bare["key"]} = "{bare["text"]}"'
    return known or _ELSE
