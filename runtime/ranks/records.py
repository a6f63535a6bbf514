"""Turns JSON that may be anybody's into frozen dataclasses, or says which value is not its field's.

pydantic does the same for files that commands read. A script needs torch alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from autopar.runtime.shown import in_a_line

MOST_CHARACTERS = 100_000  # of one text
_SHOWN_CHARACTERS = 40
_LARGEST = 2**60  # bytes, elements, rows: more than any machine has
_Record = TypeVar("_Record")


class NotARecordError(ValueError):
    """A value that is not what its field asks for; the text says where it is."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a value has to be beyond its type, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


Count: TypeAlias = Annotated[int, Check("0 or more", lambda count: 0 <= count <= _LARGEST)]


def parsed(text: str | bytes) -> Any:
    """Return what a JSON text holds; ValueError for every text that is none, endless nests too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def record(kind: type[_Record], value: Any, *, where: str = "") -> _Record:
    """Return a value of JSON as a dataclass; `where` is the place of the value, for messages."""
    made: _Record = _made(kind, value, where)
    return made


def _made(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        made, check = _made(arguments[0], value, where), arguments[1]
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
    """Return a value as the first kind that takes it; 3 stays an int where it may be one."""
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
            raise NotARecordError(f"{_inside(where, name)}: no field is called so")
    for name, (_, has_default) in asked.items():
        if name not in value and not has_default:
            raise NotARecordError(f"{_inside(where, name)} is missing")
    given = {name: _made(asked[name][0], one, _inside(where, name)) for name, one in value.items()}
    return kind(**given)


@cache
def _fields_of(kind: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the fields of a dataclass: the type of each, and whether it may be left out."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        one.name: (hints[one.name], (one.default, one.default_factory) != (MISSING, MISSING))
        for one in fields(kind)
    }


def _plain(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) in (int, float):
        with suppress(OverflowError):  # a whole number that is too large
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
