"""Edits files at random, as damage and ill will do: values that no field takes, parts left out."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any, cast

HOSTILE = "\"\"\"\n\x1b[31m{x}{{ y }}'; __import__('os').abort()  # \\"
VALUES: tuple[Any, ...] = (
    -1, 0, 3, 10**12, 10**400, -1.5, 1e300, nan, inf, "", "nothing", HOSTILE, "x" * 100_000,
    None, True, [], {}, [[[]]], {"tensor": "x"}, {"list": [1]}, {"float": "nan"},
)  # fmt: skip
_WORDS = ("-1", "0", "1e300", "nan", '"', "[", "]", "[[", "\n", "\0", "=", ",", HOSTILE, "9" * 5000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """An edited file, and what was done to it."""

    place: str
    done: str
    content: bytes

    def __str__(self) -> str:
        return f"{self.place}: {self.done}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """A kind of file: one that is right, how it is edited, and what reads it.

    `free` are the places where another value may be right and change what is read, `words` those
    of messages about a field that do not name it, `beside` the files that it is read with.
    """

    name: str
    source: bytes
    edit: Callable[[bytes, Random], Edit]
    read: Callable[[Path], object]
    free: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)


def edited_json(source: bytes, random: Random) -> Edit:
    """Change one value of a JSON file: each field of the outer level is as likely as another."""
    table = json.loads(source)
    place, holder, key = _chosen(table, random)
    ways = ("replace", "replace", "replace", "remove", "double")
    way = random.choice(ways)
    if way == "remove":
        del holder[key]
        done = "removed"
    elif way == "double" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
        done = "doubled"
    else:
        holder[key] = random.choice(VALUES)
        done = f"= {json.dumps(holder[key])[:60]}"
    return Edit(place=place, done=done, content=json.dumps(table).encode())


def _chosen(table: dict[str, Any], random: Random) -> tuple[str, Any, Any]:
    """Return the place of a value, what holds it, and by which key."""
    place, holder = "", cast("Any", table)
    while True:
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        place = f"{place}.{key}".lstrip(".")
        inside = holder[key]
        if not isinstance(inside, dict | list) or not inside or random.random() < 0.15:
            return place, holder, key
        holder = inside


def edited_text(source: bytes, random: Random) -> Edit:
    """Change some characters of a file: a number, a slice, a line, a byte."""
    start = random.randrange(len(source))
    end = min(len(source), start + random.randrange(1, 40))
    word = random.choice(_WORDS).encode()
    numbers = list(re.finditer(rb"\d+", source))
    way = random.choice(("number", "remove", "insert", "byte", "double", "cut"))
    match way:
        case "number" if numbers:
            found = random.choice(numbers)
            start, content = found.start(), source[: found.start()] + word + source[found.end() :]
        case "remove":
            content = source[:start] + source[end:]
        case "byte":
            content = source[:start] + bytes([random.randrange(256)]) + source[start + 1 :]
        case "double":
            content = source[:end] + source[start:]
        case "cut":
            content = source[:start]
        case _:
            content = source[:start] + word + source[start:]
    return Edit(place=f"byte {start}", done=f"{way} {word[:30]!r}", content=content)
