"""Turns names in which * stands for the number of a layer into the names of a model's parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")


def numbered(pattern: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Put numbers in the place of the star: ("h.*", range(2)) gives ("h.0", "h.1")."""
    before, _, behind = pattern.partition("*")
    return tuple(f"{before}{number}{behind}" for number in numbers)


def starred(name: str) -> str:
    """Put a star in the place of every number between dots: "h.0.attn" gives "h.*.attn"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def named(table: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """Give every name what the table has for it, or for it with stars; leave the others out."""
    found = ((name, table.get(name, table.get(starred(name)))) for name in names)
    return {name: value for name, value in found if value is not None}


def is_listed(name: str, listed: Collection[str]) -> bool:
    """Tell whether a name is in a list, as it is or with stars."""
    return name in listed or starred(name) in listed
