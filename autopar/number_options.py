"""Makes options that are numbers, which tell what else stands there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Any, TypeVar

import typer

from autopar.planner.errors import InputError

MOST = 2**31  # of anything that is counted
_MOST_SECONDS = 1e9
Number = TypeVar("Number", int, float)


def whole(name: str, *, least: int, most: int = MOST, metavar: str = "N", text: str) -> Any:
    """Return an option that is a whole number; `text` stands in the help."""
    expected = f"a whole number of at least {least}" + (f", at most {most}" if most < MOST else "")

    def is_meant(number: float) -> bool:
        return least <= number <= most

    parser = _reader(name, int, is_meant, fault="is not a count", expected=expected)
    return typer.Option(name, parser=parser, metavar=metavar, help=text)


def seconds(name: str, *, text: str) -> Any:
    """Return an option that is a time."""
    expected = "seconds, above 0, such as 60"
    parser = _reader(
        name,
        float,
        lambda number: 0 < number <= _MOST_SECONDS,
        fault="is no time",
        expected=expected,
    )
    return typer.Option(name, parser=parser, metavar="SECONDS", help=text)


def difference(name: str, *, text: str) -> Any:
    """Return an option that is a difference to accept."""
    expected = "a number from 0 on, such as 1e-9"
    parser = _reader(
        name, float, lambda number: 0 <= number < inf, fault="is no difference", expected=expected
    )
    return typer.Option(name, parser=parser, metavar="X", help=text)


def _reader(
    name: str,
    kind: type[Number],
    is_meant: Callable[[float], bool],
    *,
    fault: str,
    expected: str,
) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        with suppress(ValueError):
            number = kind(text)
            if is_meant(number):
                return number
        raise InputError(f"{text!r} {fault}", where=name, expected=expected)

    return read
