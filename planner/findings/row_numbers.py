"""Finds where a model computes with the number of rows, be it of a batch or of a part of one."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.planner.extent import Extent
from autopar.planner.ops import Op

_NUMBERS = frozenset(  # the arguments that hold a plain number to compute with
    {"other", "self", "alpha", "beta", "scale", "value", "min", "max", "exponent", "fill_value"}
)


def numbers(op: Op) -> Iterator[int | float | Extent]:
    """Yield the plain numbers that an op computes with."""
    for name, value in op.arguments:
        if name in _NUMBERS and isinstance(value, (int, float, Extent)):
            yield value


def counts_rows(op: Op) -> bool:
    """Whether an op computes with a number that depends on how many rows there are."""
    return any(isinstance(one, Extent) and not one.is_constant for one in numbers(op))
