"""Turns lists of names into short ones, in which * stands for the numbers of repeated layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from autopar.codegen.python_text import Group, call, literal, tuple_of
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


def numbered_tuple(names: Iterable[str]) -> Group:
    """Return a tuple of names as Python, those that count up as `numbered("h.*", range(4))`."""
    runs = tuple(numbered_runs(names))
    if len(runs) == 1 and isinstance(runs[0], Group):
        return Group(runs[0].opening.removeprefix("*"), runs[0].items, runs[0].closing)
    return tuple_of(*(run.flat if isinstance(run, Group) else run for run in runs))


def numbered_runs(names: Iterable[str]) -> Iterator[str | Group]:
    """Yield names as Python, those that count up as `*numbered(…)`."""
    run: list[str] = []
    for name in names:
        if run and not _follows(run[-1], name):
            yield from _told(run)
            run = []
        run.append(name)
    yield from _told(run)


def _follows(before: str, name: str) -> bool:
    """Whether a name is the next one of the same pattern."""
    (pattern, number), (own_pattern, own_number) = _numbered(before), _numbered(name)
    return (
        number is not None
        and own_number is not None
        and pattern == own_pattern
        and own_number == number + 1
    )


def _told(run: list[str]) -> Iterator[str | Group]:
    if len(run) < 2:
        yield from map(literal, run)
        return
    pattern, first = _numbered(run[0])
    bounds = f"{first}, {first + len(run)}" if first else f"{len(run)}"
    yield call("*numbered", literal(pattern), f"range({bounds})")


def _numbered(name: str) -> tuple[str, int | None]:
    """Return a name with a star for its only number, and the number; the name where it has none."""
    found = re.findall(r"(?<![^.])(?:0|[1-9]\d*)(?![^.])", name)
    if len(found) != 1 or "*" in name:
        return name, None
    return starred(name), int(found[0])
