"""Chooses how many devices to take: by a deadline, a budget, an objective, or the knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.errors import InfeasibleError, InputError
from autopar.planner.plan.declared.constraints import Constraints, Objective
from autopar.planner.plan.fleet.curve import Curve, Point

_UNITS = (("days", 86400.0, 2), ("h", 3600.0, 1), ("min", 60.0, 1), ("s", 1.0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen point, and by what it was chosen."""

    point: Point
    why: str
    is_knee: bool = False


def choose(curve: Curve, constraints: Constraints) -> Choice:
    """Return the cheapest point in time, the fastest within the money, or what else is asked for.

    With neither a deadline nor a budget nor an objective that is the knee.
    """
    _check_prices(curve, constraints)
    left = _affordable(_in_time(curve.points, constraints), constraints)
    declared = {one.field for one in constraints.declared}
    rest = Curve(trials=curve.trials, points=tuple(left))
    if constraints.objective is Objective.MEMORY:
        point = min(left, key=lambda one: one.plan.prediction.peak_memory.device_bytes)
        return Choice(point=point, why="the one of least memory")
    is_limited = "deadline_seconds" in declared or "budget_usd" in declared
    by_cost = constraints.objective is Objective.COST
    if by_cost or ("deadline_seconds" in declared and "objective" not in declared):
        return Choice(point=rest.cheapest, why=f"the cheapest{_limits(constraints)}")
    if is_limited or "objective" in declared:
        return Choice(point=rest.fastest, why=f"the fastest{_limits(constraints)}")
    return Choice(point=rest.knee, why="the knee", is_knee=True)


def _check_prices(curve: Curve, constraints: Constraints) -> None:
    asked = constraints.budget_usd is not None
    nameless = [one.plan for one in curve.points if one.plan.machines.usd_per_hour is None]
    if asked and nameless:
        raise InputError(
            f"a budget, and no price of {nameless[0].machines.device} is known",
            fix="give usd_per_hour to the device in a cluster file (docs/cluster-file.md)",
        )


def _in_time(points: Sequence[Point], constraints: Constraints) -> Sequence[Point]:
    """Return the points that meet the deadline; refuse where none does."""
    limit = constraints.deadline_seconds
    if limit is None:
        return points
    left = [one for one in points if (one.training_seconds or 0.0) <= limit]
    if left:
        return left
    best = min(points, key=lambda one: one.training_seconds or 0.0)
    raise InfeasibleError(
        f"no number of devices trains {_work(constraints)} in {time_text(limit)}: the fastest of "
        f"those asked for, {best.devices}, {_take(best)} {time_text(best.training_seconds or 0.0)}",
        fix="allow more time, more or faster devices (--gpus, --device), or less work",
    )


def _affordable(points: Sequence[Point], constraints: Constraints) -> Sequence[Point]:
    """Return the points within the budget; refuse where none is."""
    limit = constraints.budget_usd
    if limit is None:
        return points
    left = [one for one in points if (one.training_usd or 0.0) <= limit]
    if left:
        return left
    best = min(points, key=lambda one: one.training_usd or 0.0)
    within = "" if constraints.deadline_seconds is None else " that meets the deadline"
    raise InfeasibleError(
        f"no number of devices{within} trains {_work(constraints)} for {usd_text(limit)}: the "
        f"cheapest of those asked for, {best.devices}, {_cost(best)} "
        f"{usd_text(best.training_usd or 0.0)}",
        fix="allow more money, fewer or cheaper devices (--gpus, --device), or less work",
    )


def _take(point: Point) -> str:
    return "takes" if point.devices == 1 else "take"


def _cost(point: Point) -> str:
    return "costs" if point.devices == 1 else "cost"


def _work(constraints: Constraints) -> str:
    if constraints.tokens is not None:
        return f"{constraints.tokens:,} tokens"
    return f"{constraints.samples or 0:,} samples"


def _limits(constraints: Constraints) -> str:
    """Return the limits that a choice keeps, as they go on after "the cheapest"."""
    in_time, money = constraints.deadline_seconds, constraints.budget_usd
    parts = (
        "" if in_time is None else f"in {time_text(in_time)}",
        "" if money is None else f"within {usd_text(money)}",
    )
    return "".join(f" {part}" for part in parts if part)


def time_text(seconds: float) -> str:
    """Return how long a training takes, as people say it: "31.2 h"."""
    for unit, size, least in _UNITS:
        if seconds >= size * least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def usd_text(usd: float) -> str:
    """Return an amount of money: "1,240 USD"."""
    return f"{usd:,.0f} USD" if usd >= 100 else f"{usd:.3g} USD"
