"""A change of an emitted script by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of a script, and what comes in its place."""

    name: str
    old: str
    new: str = ""
