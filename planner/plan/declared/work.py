"""Reads how much a training is to do, until when, and for how much money."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from autopar.planner.cluster.units import FIGURE
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import Constraints

_COUNTS: Mapping[str, float] = MappingProxyType(
    {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
)
_TIMES: Mapping[str, float] = MappingProxyType(
    {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "days": 86400.0, "w": 604800.0}
)
_MONEY: Mapping[str, float] = MappingProxyType({"": 1.0, "USD": 1.0, "$": 1.0, "k": 1e3, "M": 1e6})


def read_units(value: object, where: str) -> int:
    """Return the rows or tokens that "10B" or "300_000" is."""
    number = _read(value, _COUNTS, where=where, expected='a number such as "10B" or "500M"')
    if number < 1:
        raise InputError(f"{value!r} is less than one", where=where)
    return round(number)


def read_deadline(value: object, where: str) -> float:
    """Return the seconds that "24h" is."""
    return _read(value, _TIMES, where=where, expected='a time such as "24h", "90min" or "3d"')


def read_budget(value: object, where: str) -> float:
    """Return the US dollars that "500" or "2k" is."""
    return _read(value, _MONEY, where=where, expected='US dollars, such as "500" or "2k"')


def _read(value: object, units: Mapping[str, float], *, where: str, expected: str) -> float:
    match = FIGURE.fullmatch(str(value))
    is_read = match is not None and match[2] in units and not isinstance(value, bool)
    number = float(match[1].replace("_", "")) * units[match[2]] if match and is_read else math.nan
    if not 0 < number < math.inf:
        raise InputError(f"{value!r} cannot be read", where=where, expected=expected)
    return number


def check_work(constraints: Constraints) -> None:
    """Refuse a deadline or a budget of no known work, and work that is said twice."""
    own = {one.field: one for one in constraints.declared}
    if "samples" in own and "tokens" in own:
        raise InputError(
            f"{own['samples']} and {own['tokens']} both say how much a training does",
            fix="leave one of them out",
        )
    limit = own.get("deadline_seconds") or own.get("budget_usd")
    if limit is not None and not {"samples", "tokens"} & own.keys():
        raise InputError(
            f"{limit.text} is of a training whose length is not known",
            where=limit.origin,
            fix="--tokens 10B, or --samples 1M, says how much it does",
        )


def check_tokens(constraints: Constraints, *, tokens_per_row: int) -> None:
    """Refuse tokens of a model whose rows have no sequence."""
    if constraints.tokens is not None and tokens_per_row == 1:
        own = next(one for one in constraints.declared if one.field == "tokens")
        raise InputError(
            f"{own.text} of a model whose rows are no sequences of tokens",
            where=own.origin,
            fix="--samples says how many rows it trains on",
        )
