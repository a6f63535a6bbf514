"""Makes options that are numbers, which tell what else stands there."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any, TypeVar

import typer

from autopar.planner.errors import InputError

Number = TypeVar("Number", int, float)


def whole(name: str, *, least: int, most: float = inf, metavar: str = "N", text: str) -> Any:
    """Return an option that is a whole number; `text` stands in the help."""
    expected = f"a whole number of at least {least}" + (f", at most {most}" if most < inf else "")

    def is_meant(number: float) -> bool:
        return least <= number < inf and number <= most and number == int(number)

    parser = _reader(name, int, is_meant, fault="is not a count", expected=expected)
    return typer.Option(name, parser=parser, metavar=metavar, help=text)


def seconds(name: str, *, text: str) -> Any:
    """Return an option that is a time."""
    expected = "seconds, above 0, such as 60"
    parser = _reader(
        name, float, lambda number: 0 < number < inf, fault="is no time", expected=expected
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
        try:
            number = float(text)
        except ValueError:
            number = nan
        if not is_meant(number):
            raise InputError(f"{text!r} {fault}", where=name, expected=expected)
        return kind(number)

    return read
