"""Reads one table of a TOML file key by key, with one clear message for each fault."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from autopar.planner.errors import InputError, gathered

Value = TypeVar("Value")
Chosen = TypeVar("Chosen")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest known name, or the list of all."""
    names = tuple(known)
    return nearest(name, names) or f"known are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest known name, or nothing where none is near."""
    small = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), small, n=1, cutoff=0.5)
    return f"did you mean {small[near[0]]!r}?" if near else ""


def refuse_unknown(table: Mapping[str, object], known: Iterable[str], *, where: str) -> None:
    """Raise one error that tells all keys of a table that are not known."""
    names = tuple(known)
    unknown = [key for key in table if key not in names]
    if unknown:
        raise gathered(
            [f"unknown key {key!r}: {did_you_mean(key, names)}" for key in unknown], where=where
        )


def required(table: Mapping[str, object], key: str, *, where: str) -> object:
    """Return the value of a key that must be there."""
    if key not in table:
        raise InputError(f"{key!r} is missing", where=where, fix=f"add a line `{key} = …`")
    return table[key]


def figure(
    table: Mapping[str, object],
    key: str,
    parse: Callable[..., Value],
    *,
    where: str,
    default: Value | None = None,
) -> Value:
    """Return a figure with a unit; without a default it must be there."""
    if key not in table and default is not None:
        return default
    return parse(required(table, key, where=where), where=f"{where}.{key}")


def count(table: Mapping[str, object], key: str, *, where: str, default: int | None = None) -> int:
    """Return a whole number of at least one."""
    if key not in table and default is not None:
        return default
    value = required(table, key, where=where)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"{value!r} is not a count",
            where=f"{where}.{key}",
            expected="a whole number of at least 1",
        )
    return value


def number(
    table: Mapping[str, object], key: str, *, where: str, default: float | None = None
) -> float:
    """Return a positive, finite number without a unit."""
    if key not in table and default is not None:
        return default
    value = required(table, key, where=where)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{value!r} is not a positive, finite number", where=f"{where}.{key}")
    return float(value)


def share(
    table: Mapping[str, object], key: str, *, where: str, default: float | None = None
) -> float:
    """Return a number above 0 and at most 1."""
    value = number(table, key, where=where, default=default)
    if value > 1:
        raise InputError(
            f"{value!r} is more than 1",
            where=f"{where}.{key}",
            expected="a share of the rate, at most 1",
        )
    return value


def text(table: Mapping[str, object], key: str, *, where: str, default: str | None = None) -> str:
    """Return a text that is not empty."""
    if key not in table and default is not None:
        return default
    value = required(table, key, where=where)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{value!r} is not a text", where=f"{where}.{key}", expected='a text in quotes, "…"'
        )
    return value


def flag(table: Mapping[str, object], key: str, *, where: str) -> bool:
    """Return true or false; false when the key is absent."""
    value = table.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{value!r} is neither true nor false", where=f"{where}.{key}")
    return value


def choice(
    table: Mapping[str, object],
    key: str,
    known: Mapping[str, Chosen],
    *,
    where: str,
    default: str | None = None,
) -> Chosen:
    """Return what a name stands for."""
    name = text(table, key, where=where, default=default)
    if name not in known:
        raise InputError(
            f"{name!r} is not known", where=f"{where}.{key}", fix=did_you_mean(name, known)
        )
    return known[name]


def subtable(value: object, *, where: str) -> Mapping[str, object]:
    """Return a value that must be a table."""
    if not isinstance(value, Mapping):
        raise InputError(
            f"{value!r} is not a table", where=where, fix=f"write it as a section [{where}]"
        )
    return value
