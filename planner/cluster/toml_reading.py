"""Reads TOML files key by key, with one clear message for each fault."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from types import MappingProxyType
from typing import Any, TypeVar

from autopar.planner.errors import InputError, gathered

DECIMAL = ("", "K", "M", "G", "T", "P")
BINARY = ("Ki", "Mi", "Gi", "Ti", "Pi")


def _byte_units() -> dict[str, float]:
    decimal = {f"{prefix}B": 1000.0**power for power, prefix in enumerate(DECIMAL)}
    binary = {f"{prefix}B": 1024.0 ** (power + 1) for power, prefix in enumerate(BINARY)}
    return decimal | binary


def _bandwidth_units() -> dict[str, float]:
    bytes_per_second = {f"{unit}/s": size for unit, size in _byte_units().items()}
    bits_per_second = {f"{prefix}b/s": 1000.0**power / 8 for power, prefix in enumerate(DECIMAL)}
    bit_names = {f"{prefix}bps": 1000.0**power / 8 for power, prefix in enumerate(DECIMAL)}
    return bytes_per_second | bits_per_second | bit_names


BYTES: Mapping[str, float] = MappingProxyType(_byte_units())
BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(_bandwidth_units())
SECONDS: Mapping[str, float] = MappingProxyType(
    {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
)
FLOPS_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {
        f"{prefix}{name}": 1000.0**power
        for power, prefix in enumerate(DECIMAL)
        for name in ("FLOP/s", "FLOPS")
    }
)
_LEAST, _MOST = 1e-15, 1e18  # no latency (in seconds) is shorter; no rate or memory is larger
WATTS: Mapping[str, float] = MappingProxyType({"W": 1.0, "kW": 1000.0})

FIGURE = re.compile(
    r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?inf|nan)\s*(\S*)\s*", re.IGNORECASE
)


def parse_bytes(value: object, *, where: str) -> int:
    """Return the bytes of a size such as "80 GiB"."""
    return max(1, round(_parse(value, BYTES, where=where, example="80 GiB")))


def parse_seconds(value: object, *, where: str) -> float:
    """Return the seconds of a time such as "25 us"."""
    return _parse(value, SECONDS, where=where, example="25 us")


def parse_bytes_per_second(value: object, *, where: str) -> float:
    """Return the bytes per second of a rate such as "450 GB/s"."""
    return _parse(value, BYTES_PER_SECOND, where=where, example="450 GB/s")


def parse_flops_per_second(value: object, *, where: str) -> float:
    """Return the FLOPs per second of a rate such as "312 TFLOP/s"."""
    return _parse(value, FLOPS_PER_SECOND, where=where, example="312 TFLOP/s")


def parse_watts(value: object, *, where: str) -> float:
    """Return the watts of a power such as "700 W"."""
    return _parse(value, WATTS, where=where, example="700 W")


def _parse(value: object, units: Mapping[str, float], *, where: str, example: str) -> float:
    fix = f'write a number and its unit, for example "{example}"'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise InputError(f"{value} has no unit", where=where, fix=fix)
    match = FIGURE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InputError(f"{value!r} is not a figure with a unit", where=where, fix=fix)
    number, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        raise InputError(f"{value!r} has no unit", where=where, fix=fix)
    if unit not in units:
        known = ", ".join(units)
        meant = [one for one in units if one.casefold() in (unit.casefold(), f"{unit}b".casefold())]
        raise InputError(
            f"{value!r} has the unknown unit {unit!r}",
            where=where,
            expected=f"one of {known}",
            fix=f"did you mean {match[1]} {' or '.join(meant)}?" if meant else fix,
        )
    figure = number * units[unit]
    if not math.isfinite(figure) or figure <= 0:
        raise InputError(f"{value!r} is not a positive, finite figure", where=where, fix=fix)
    if not _LEAST <= figure <= _MOST:
        raise InputError(f"no machine has {value!r}", where=where, fix="check the unit")
    return figure


def bytes_text(size_bytes: float) -> str:
    """Return a size as people read it: "79.6 GiB"."""
    power = min(int(math.log(max(size_bytes, 1), 1024)), len(BINARY))
    return f"{size_bytes / 1024**power:.4g} {BINARY[power - 1] if power else ''}B"


def seconds_text(seconds: float) -> str:
    """Return a time as people read it: "1.53 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def bandwidth_text(bytes_per_second: float) -> str:
    """Return a bandwidth as people read it: "450 GB/s"."""
    power = min(int(math.log(max(bytes_per_second, 1), 1000)), len(DECIMAL) - 1)
    return f"{bytes_per_second / 1000**power:.4g} {DECIMAL[power]}B/s"


_PLACE = re.compile(r"(?P<fault>.*) \(at line (?P<line>\d+), column (?P<column>\d+)\)")
_BARE_TEXT = re.compile(r"\s*(?P<key>[\w.-]+)\s*=\s*(?P<text>\w[^\"'#,\[\]{}]*?)\s*(#.*)?")
_FIXES = (  # how tomllib's message begins → what to do
    ("Cannot overwrite a value", "the key is already defined: leave one of the two out"),
    ("Cannot declare", "the section is already defined: put all of its keys below one header"),
    ("Expected '=' after a key", "write it as key = value"),
    ("Expected ']'", "close the bracket"),
)
_ELSE = "write key = value, with texts in quotes that are closed on the same line"


def parsed(source: str, *, where: str) -> Mapping[str, Any]:
    """Parse a TOML text; `where` names it in messages."""
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        found = _PLACE.fullmatch(str(error))
        if found is None:  # at the end of the file: a quote or bracket was not closed
            raise InputError(
                f"not a valid TOML file: {error}",
                where=where,
                fix="close the quote or bracket that is open",
            ) from None
        line = source.split("\n")[int(found["line"]) - 1].strip()
        raise InputError(
            f"not a valid TOML file: {found['fault']}",
            where=f"{where}, line {found['line']}, column {found['column']}: {line}",
            fix=_fix(found["fault"], line),
        ) from None
    except RecursionError:
        raise InputError("the TOML file is nested too deeply", where=where) from None
    except ValueError as error:  # Python limits the digits of an int
        raise InputError(f"not a valid TOML file: {error}", where=where, fix=_ELSE) from None


def _fix(fault: str, line: str) -> str:
    known = next((fix for beginning, fix in _FIXES if fault.startswith(beginning)), "")
    bare = _BARE_TEXT.fullmatch(line)
    if not known and bare:
        return f'texts need quotes: {bare["key"]} = "{bare["text"]}"'
    return known or _ELSE


def shipped(folder: str, file: str) -> dict[str, Any]:
    """Return the content of a TOML file that autopar ships in a folder of the planner."""
    source = resources.files(f"autopar.planner.{folder}").joinpath(file)
    return tomllib.loads(source.read_text(encoding="utf-8"))


def in_plain_units(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shipped table with its figures in seconds and bytes: 25e-6 for "25 us"."""

    def plain(value: object) -> object:
        figure = FIGURE.fullmatch(value) if isinstance(value, str) else None
        if figure is None:
            return value
        parse = parse_seconds if figure[2] in SECONDS else parse_bytes
        return parse(value, where="")

    return {key: plain(value) for key, value in table.items()}


TOP = "the top of the file"
HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")


@contextmanager
def placed(source: str, *, where: str) -> Iterator[None]:
    """Add line numbers to faults of a TOML text; `where` names the text."""
    try:
        yield
    except InputError as error:
        line = line_of(source, error.where, error.found)
        own = error.where.removeprefix(f"{TOP}.")
        place = ", ".join(part for part in (where, line and f"line {line}", own) if part)
        raise InputError(error.found, where=place, expected=error.expected, fix=error.fix) from None


def line_of(source: str, where: str, found: str = "") -> int | None:
    """Return the line of a place such as "network.bandwidth" or "nodes 2.count", or None if unsure.

    The place names a section, the number of its occurrence, and at most one key in it. An unknown
    key is only in the fault's text, in quotes.
    """
    section, key = _split(where)
    numbered = re.fullmatch(r"(.*) (\d+)", section)
    name, number = (numbered[1], int(numbered[2])) if numbered else (section, 1)
    start = _section_start(source, name, number)
    if start is None:
        return None
    quoted = re.match(r"(?:- )?unknown key '([^']+)'", found)
    return _key_line(source, start, quoted[1] if quoted else key) or start or None


def _split(where: str) -> tuple[str, str]:
    """Return section and key; names of devices' and links' sections have two parts."""
    parts = where.split(".")
    size = 2 if parts[0] in ("devices", "links") else 1
    return ".".join(parts[:size]), parts[size] if len(parts) > size else ""


def _section_start(source: str, name: str, number: int) -> int | None:
    """Return the line of the number-th header of a section; 0 is the top of the file."""
    if name in ("", TOP):
        return 0
    seen = 0
    for line, text in enumerate(source.splitlines(), start=1):
        header = HEADER.match(text)
        if header and header[1].replace('"', "") == name:
            seen += 1
            if seen == number:
                return line
    return None


def _key_line(source: str, start: int, key: str) -> int | None:
    """Return the line of a key between a header and the next one.

    If `start` is 0, return the first line of the file with the key or with a header of its name.
    """
    if not key:
        return None
    for line, text in enumerate(source.splitlines()[start:], start=start + 1):
        header = HEADER.match(text)
        if header and start:
            return None
        if re.match(rf"\s*\"?{re.escape(key)}\"?\s*[.=]", text) or (header and header[1] == key):
            return line
    return None


Value = TypeVar("Value")
Chosen = TypeVar("Chosen")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest known name, or the list of all."""
    names = tuple(known)
    return nearest(name, names) or f"known are {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest known name, or an empty text."""
    word, small = name.casefold(), {one.casefold(): one for one in known}
    near = difflib.get_close_matches(word, small, n=3, cutoff=0.5)
    best = max(near, key=lambda one: _likeness(one, word), default="")
    return f"did you mean {small[best]!r}?" if near else ""


def _likeness(one: str, word: str) -> tuple[float, bool, bool]:
    """Return a sort key of likeness: difflib's ratio, the same letters, the same first letter."""
    ratio = difflib.SequenceMatcher(None, one, word).ratio()
    return ratio, sorted(one) == sorted(word), one[:1] == word[:1]


def refuse_unknown(table: Mapping[str, object], known: Iterable[str], *, where: str) -> None:
    """Raise one error for all unknown keys of a table."""
    names = tuple(known)
    unknown = [key for key in table if key not in names]
    if unknown:
        raise gathered(
            [f"unknown key {key!r}: {did_you_mean(key, names)}" for key in unknown], where=where
        )


def required(
    table: Mapping[str, object], key: str, *, where: str, default: object = None
) -> object:
    """Return the value of a key; without a default the key is required."""
    if key not in table and default is None:
        raise InputError(f"{key!r} is missing", where=where, fix=f"add a line `{key} = …`")
    return table.get(key, default)


def optional(
    read: Callable[..., Value], table: Mapping[str, object], key: str, *more: object, where: str
) -> Value | None:
    """Return what `read` makes of a key; None if the key is absent."""
    return read(table, key, *more, where=where) if key in table else None


def figure(
    table: Mapping[str, object],
    key: str,
    parse: Callable[..., Value],
    *,
    where: str,
    default: Value | None = None,
) -> Value:
    """Return a figure with a unit; without a default the key is required."""
    if key not in table and default is not None:
        return default
    return parse(required(table, key, where=where), where=f"{where}.{key}")


def count(table: Mapping[str, object], key: str, *, where: str, default: int | None = None) -> int:
    """Return a positive integer."""
    value = required(table, key, where=where, default=default)
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
    value = required(table, key, where=where, default=default)
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
    """Return a string that is not empty."""
    value = required(table, key, where=where, default=default)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{value!r} is not a text", where=f"{where}.{key}", expected='a text in quotes, "…"'
        )
    return value


def flag(table: Mapping[str, object], key: str, *, where: str) -> bool:
    """Return a boolean; False if the key is absent."""
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
    """Return the object in `known` that a key's value names."""
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
