"""Turns lists of names into short ones, in which * stands for the numbers of repeated layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeVar

from autopar.codegen.python_text import Source, literal
from autopar.runtime.layer_names import starred

Value = TypeVar("Value")


def patterns(table: Mapping[str, Value], known: Iterable[str]) -> dict[str, Value]:
    """Return a table with a starred name in the place of all names that it stands for.

    `known` are all names of the kind: a star may not take in one that the table does not have.
    """
    families: dict[str, list[str]] = {}
    for name in {**dict.fromkeys(known), **dict.fromkeys(table)}:
        families.setdefault(starred(name), []).append(name)
    found: dict[str, Value] = {}
    for name, value in table.items():
        family = families[starred(name)]
        alike = all(fellow in table and table[fellow] == value for fellow in family)
        found[starred(name) if alike and len(family) > 1 else name] = value
    return found


def numbered_runs(names: Iterable[str]) -> Iterator[Source]:
    """Yield names as Python, those that count up as `*numbered("h.*", range(0, 4))`."""
    numbers = [(name, *_numbered(name)) for name in names]
    places = enumerate(numbers)
    for _, run in groupby(
        places, key=lambda p: (p[1][1], None if p[1][2] is None else p[1][2] - p[0])
    ):
        members = [name for _, (name, _, _) in run]
        _, pattern, first = next(n for n in numbers if n[0] == members[0])
        if first is None or len(members) == 1:
            yield from (literal(name) for name in members)
        else:
            bounds = f"{first}, {first + len(members)}" if first else f"{len(members)}"
            yield Source(f"*numbered({literal(pattern)}, range({bounds}))")


def _numbered(name: str) -> tuple[str, int | None]:
    """Return a name with a star for its only number, and the number; the name where it has none."""
    found = re.findall(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])", name)
    if len(found) != 1 or "*" in name:
        return name, None
    return starred(name), int(found[0])
