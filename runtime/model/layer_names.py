"""Turns names in which * stands for the number of a layer into the names of a model's parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

Value = TypeVar("Value")


def numbered(pattern: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Put numbers in the place of the star: ("h.*", range(2)) gives ("h.0", "h.1")."""
    before, _, behind = pattern.partition("*")
    return tuple(f"{before}{number}{behind}" for number in numbers)


def starred(name: str) -> tuple[str, ...]:
    """Put stars in the place of some of the numbers between dots, of few of them first.

    "h.0.mlp.2" gives "h.*.mlp.2", "h.0.mlp.*", "h.*.mlp.*".
    """
    parts = name.split(".")
    places = [place for place, part in enumerate(parts) if part.isdecimal()]
    chosen = (some for count in range(len(places)) for some in combinations(places, count + 1))
    return tuple(
        ".".join("*" if place in some else part for place, part in enumerate(parts))
        for some in chosen
    )


def named(table: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Give every name what the table has for it, or for it with stars; leave the others out."""
    found = (
        (name, next((n for n in (name, *starred(name)) if n in table), None)) for name in names
    )
    return {name: table[listed] for name, listed in found if listed is not None}


def is_listed(name: str, listed: Collection[str]) -> bool:
    """Tell whether a name is in a list, as it is or with stars."""
    return name in listed or any(one in listed for one in starred(name))
