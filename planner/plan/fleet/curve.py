"""Turns the plans of one training on several numbers of devices into a curve with its knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import units_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was planned for one number of devices; without a plan, why there is none."""

    devices: int
    plan: Plan | None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of devices of a curve, and what its plan comes to.

    `speedup` and `efficiency` are against the fewest devices that have a plan. The last two are of
    the whole training, where its length is known; money is None where a device has no price.
    """

    plan: Plan
    devices: int
    step_seconds: float
    speedup: float
    efficiency: float
    units_per_second: float
    units_per_usd: float | None
    training_seconds: float | None
    training_usd: float | None

    @property
    def rate(self) -> float:
        """What a second costs: money, or as many units of it as there are devices."""
        return self.plan.machines.usd_per_hour or float(self.devices)

    @property
    def step_cost(self) -> float:
        """What a step costs, in units that all points of a curve share."""
        return self.rate * self.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The numbers of devices that were asked for, ascending, and the points of those with plans."""

    trials: tuple[Trial, ...]
    points: tuple[Point, ...]

    @property
    def knee(self) -> Point:
        """The point where cost × time of a step is least.

        The knee of Eager, Zahorjan and Lazowska (Speedup versus efficiency in parallel systems,
        1989), where efficiency ÷ time is greatest: up to there a step that is 1 % shorter costs
        less than 1 % more, beyond it more.
        """
        return min(self.points, key=lambda one: (one.step_cost * one.step_seconds, one.devices))

    @property
    def fastest(self) -> Point:
        """The point of the shortest step."""
        return min(self.points, key=lambda one: (one.step_seconds, one.devices))

    @property
    def cheapest(self) -> Point:
        """The point whose step costs least."""
        return min(self.points, key=lambda one: (one.step_cost, one.step_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """Fewer devices that are as fast, and a step that they take at most."""

    devices: int
    step_seconds: float


def curve_of(trials: Sequence[Trial], constraints: Constraints) -> Curve:
    """Return the curve of some trials, at least one of them with a plan."""
    trials = sorted(trials, key=lambda one: one.devices)
    plans = [one.plan for one in trials if one.plan is not None]
    points = tuple(_point(plan, plans[0], constraints) for plan in plans)
    return Curve(trials=tuple(trials), points=points)


def _point(plan: Plan, first: Plan, constraints: Constraints) -> Point:
    devices, step = plan.machines.devices, plan.prediction.step_seconds
    speedup = first.prediction.step_seconds / step
    rate = units_per_second(plan.arrangement, plan.model, step)
    hourly = plan.machines.usd_per_hour
    steps = steps_of(plan, constraints)
    seconds = None if steps is None else steps * step
    return Point(
        plan=plan,
        devices=devices,
        step_seconds=step,
        speedup=speedup,
        efficiency=speedup * first.machines.devices / devices,
        units_per_second=rate,
        units_per_usd=rate * 3600 / hourly if hourly else None,
        training_seconds=seconds,
        training_usd=seconds * hourly / 3600 if seconds is not None and hourly else None,
    )


def steps_of(plan: Plan, constraints: Constraints) -> int | None:
    """Return the steps of the whole training, None where its length is not known."""
    batch = plan.arrangement.global_batch
    if constraints.tokens is not None:
        return ceil(constraints.tokens / (batch * plan.model.tokens_per_row))
    return None if constraints.samples is None else ceil(constraints.samples / batch)
