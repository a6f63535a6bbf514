"""Plans a training for several numbers of devices (a curve), and chooses one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.file import first_devices, prefix_sizes
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.errors import AutoparError, InfeasibleError, InputError, TimeLimitError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import Constraints, Objective
from autopar.planner.plan.declared.limits import completed, with_batch
from autopar.planner.plan.plan import Model, Plan
from autopar.planner.plan.search.ahead import Idle, none
from autopar.planner.plan.search.best_first import FoundLeaf, SearchNode, best_first
from autopar.planner.plan.search.search import Entry, Explorer, search
from autopar.planner.plan.solving.candidate import Candidate
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.plan.solving.prices import Prices
from autopar.planner.plan.telling.words import units_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A traced model, and everything else that a search needs besides machines."""

    graph: Graph
    axes: GraphAxes
    layers: Layers
    model: Model
    constraints: Constraints
    measured: Measurements | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The plan for one number of devices, or why there is none."""

    devices: int
    plan: Plan | None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A number of devices on a curve, and the figures of its plan.

    `speedup` and `efficiency` are relative to the fewest devices with a plan. `training_seconds`
    and `training_usd` are None if the training's length is unknown. `training_usd` is also None if
    a device has no price. `rate` is the cost per hour: US dollars, or the number of devices if a
    device of any point has no price.
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
    rate: float

    def value(self, objective: Objective) -> float:
        """Return what an objective minimises; costs are in a unit that all points share."""
        return objective.minimised(self.plan.prediction, self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The requested numbers of devices, ascending, and the points of those with a plan."""

    trials: tuple[Trial, ...]
    points: tuple[CurvePoint, ...]

    @property
    def knee(self) -> CurvePoint:
        """The point where cost × time of a step is least.

        The knee of Eager, Zahorjan and Lazowska (Speedup versus efficiency in parallel systems,
        1989), where efficiency ÷ time is greatest. Below it, shortening the step by 1 % raises its
        cost by less than 1 %; above it, by more.
        """

        def cost_times_seconds(one: CurvePoint) -> tuple[float, int]:
            return one.value(Objective.COST) * one.step_seconds, one.devices

        return min(self.points, key=cost_times_seconds)

    def best(self, objective: Objective) -> CurvePoint:
        """Return the best point for an objective; of equally good ones the fastest."""
        return min(
            self.points, key=lambda one: (one.value(objective), one.step_seconds, one.devices)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A smaller number of devices that is as fast, and the time of its fastest plan's step."""

    devices: int
    step_seconds: float


def curve_of(trials: Sequence[Trial], constraints: Constraints) -> Curve:
    """Return the curve of trials, at least one of them with a plan."""
    trials = sorted(trials, key=lambda one: one.devices)
    plans = [one.plan for one in trials if one.plan is not None]
    are_priced = all(one.machines.usd_per_hour for one in plans)
    points = (_point(plan, plans[0], constraints, are_priced=are_priced) for plan in plans)
    return Curve(trials=tuple(trials), points=tuple(points))


def _point(plan: Plan, first: Plan, constraints: Constraints, *, are_priced: bool) -> CurvePoint:
    devices, step = plan.machines.devices, plan.prediction.step_seconds
    speedup = first.prediction.step_seconds / step
    rate = units_per_second(plan.arrangement, plan.model, step)
    hourly = plan.machines.usd_per_hour
    steps = steps_of(plan, constraints)
    seconds = None if steps is None else steps * step
    return CurvePoint(
        plan=plan,
        devices=devices,
        step_seconds=step,
        speedup=speedup,
        efficiency=speedup * first.machines.devices / devices,
        units_per_second=rate,
        units_per_usd=rate * 3600 / hourly if hourly else None,
        training_seconds=seconds,
        training_usd=seconds * hourly / 3600 if seconds is not None and hourly else None,
        rate=hourly if are_priced and hourly else float(devices),
    )


def steps_of(plan: Plan, constraints: Constraints) -> int | None:
    """Return the steps of the whole training, or None if its length is unknown."""
    batch = plan.arrangement.global_batch
    if constraints.tokens is not None:
        return ceil(constraints.tokens / (batch * plan.model.tokens_per_row))
    return None if constraints.samples is None else ceil(constraints.samples / batch)


_UNITS = (("days", 86400.0, 2), ("h", 3600.0, 1), ("min", 60.0, 1), ("s", 1.0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPoint:
    """The chosen point, and the reason."""

    point: CurvePoint
    why: str
    is_knee: bool = False


def choose(curve: Curve, constraints: Constraints) -> ChosenPoint:
    """Return the best point for the objective, within deadline and budget.

    Without an objective, it is the cheapest point within a deadline, or the fastest within a budget
    alone. Without a deadline and a budget, it is the knee.
    """
    _check_prices(curve, constraints)
    left = _affordable(_in_time(curve.points, constraints), constraints)
    declared = {one.field for one in constraints.declared}
    if declared.isdisjoint(("objective", "deadline_seconds", "budget_usd")):
        return ChosenPoint(point=curve.knee, why="the knee", is_knee=True)
    is_by_cost = "deadline_seconds" in declared and "objective" not in declared
    objective = Objective.COST if is_by_cost else constraints.objective
    point = Curve(trials=curve.trials, points=tuple(left)).best(objective)
    return ChosenPoint(point=point, why=f"{objective.best}{_limits(constraints)}")


def _check_prices(curve: Curve, constraints: Constraints) -> None:
    asked = constraints.budget_usd is not None
    unpriced = [one.plan for one in curve.points if one.plan.machines.usd_per_hour is None]
    if asked and unpriced:
        raise InputError(
            f"a budget is given, but no price of {unpriced[0].machines.device} is known",
            fix="give usd_per_hour to the device in a cluster file (docs/cluster-file.md)",
        )


def _in_time(points: Sequence[CurvePoint], constraints: Constraints) -> Sequence[CurvePoint]:
    """Return the points that meet the deadline; raises if none does."""
    limit = constraints.deadline_seconds
    if limit is None:
        return points
    left = [one for one in points if (one.training_seconds or 0.0) <= limit]
    if left:
        return left
    best = min(points, key=lambda one: one.training_seconds or 0.0)
    raise InfeasibleError(
        f"no number of devices trains {_work(constraints)} in {time_text(limit)}: "
        f"{_devices_are(best)} the fastest of the numbers asked for, and {_take(best)} "
        f"{time_text(best.training_seconds or 0.0)}",
        fix="allow more time, more or faster devices (--gpus, --device), or less work",
    )


def _affordable(points: Sequence[CurvePoint], constraints: Constraints) -> Sequence[CurvePoint]:
    """Return the points within the budget; raises if there are none."""
    limit = constraints.budget_usd
    if limit is None:
        return points
    left = [one for one in points if (one.training_usd or 0.0) <= limit]
    if left:
        return left
    best = min(points, key=lambda one: one.training_usd or 0.0)
    within = "" if constraints.deadline_seconds is None else " that meets the deadline"
    raise InfeasibleError(
        f"no number of devices{within} trains {_work(constraints)} for {usd_text(limit)}: "
        f"{_devices_are(best)} the cheapest of the numbers asked for, and {_cost(best)} "
        f"{usd_text(best.training_usd or 0.0)}",
        fix="allow more money, fewer or cheaper devices (--gpus, --device), or less work",
    )


def _devices_are(point: CurvePoint) -> str:
    return "1 device is" if point.devices == 1 else f"{point.devices} devices are"


def _take(point: CurvePoint) -> str:
    return "takes" if point.devices == 1 else "take"


def _cost(point: CurvePoint) -> str:
    return "costs" if point.devices == 1 else "cost"


def _work(constraints: Constraints) -> str:
    if constraints.tokens is not None:
        return f"{constraints.tokens:,} tokens"
    return f"{constraints.samples or 0:,} samples"


def _limits(constraints: Constraints) -> str:
    """Return the limits of a choice, worded to follow "the cheapest"."""
    in_time, money = constraints.deadline_seconds, constraints.budget_usd
    parts = (
        "" if in_time is None else f"in {time_text(in_time)}",
        "" if money is None else f"within {usd_text(money)}",
    )
    return "".join(f" {part}" for part in parts if part)


def time_text(seconds: float) -> str:
    """Return the time of a training: "31.2 h"."""
    for unit, size, least in _UNITS:
        if seconds >= size * least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def usd_text(usd: float) -> str:
    """Return an amount of money: "1,240 USD"."""
    return f"{usd:,.0f} USD" if usd >= 100 else f"{usd:.3g} USD"


def planned_curve(
    training: Training,
    clusters: Sequence[Cluster],
    *,
    time_limit_seconds: float | None = None,
    report: Callable[[str], None] = lambda _: None,
    prices: Prices | None = None,
    workers: Idle = none,
) -> Curve:
    """Return the plans on clusters of ascending sizes; raises the last error if there is no plan.

    If no global batch is declared, all plans have the default batch of the largest cluster. Each
    search has an equal share of the time.
    """
    whole = with_batch(training.constraints, clusters[-1], training.graph)
    training = replace(training, constraints=whole)
    prices, refusals = prices or Prices(), list[AutoparError]()
    began, spent = time.perf_counter(), 0.0

    def report_of(size: int) -> Callable[[str], None]:
        return report if len(clusters) == 1 else lambda text: report(f"{size} devices: {text}")

    def trials() -> Iterator[Trial]:
        nonlocal spent
        for number, cluster in enumerate(clusters):
            size, limit = cluster.size, None
            if time_limit_seconds is not None:
                left = max(time_limit_seconds - spent, 1e-9)
                limit = left / (len(clusters) - number)
            try:
                plan = search(
                    training.graph,
                    training.axes,
                    training.layers,
                    training.model,
                    cluster,
                    training.constraints,
                    time_limit_seconds=limit,
                    report=report_of(size),
                    measured=training.measured,
                    prices=prices,
                    workers=workers,
                )
                yield Trial(devices=size, plan=plan)
            except (InfeasibleError, TimeLimitError) as error:
                refusals.append(error)
                yield Trial(devices=size, plan=None, refusal=error.found)
            spent = time.perf_counter() - began

    made = tuple(trials())
    if all(one.plan is None for one in made):
        raise refusals[-1]
    return curve_of(made, training.constraints)


_MOST_COUNTS = 4  # numbers of devices that are tried
_MOST_NODES = 100  # nodes of the search for each
_LEAST_SAVED = 0.1  # of the devices: a smaller saving is within the error of predictions
_SHARE_OF_PEAK = 0.9  # no training has a higher MFU


def fewer_as_fast(
    training: Training, cluster: Cluster, plan: Plan, *, prices: Prices | None = None
) -> Fewer | None:
    """Return fewer devices whose step is at most the tolerance longer than the plan's, or None.

    Tries half as many devices, a quarter and so on, powers of two, and one node less, except
    numbers that the search's lower bounds rule out. If several numbers are as fast, the one
    with the shortest step is returned.
    """
    constraints = completed(training.constraints, cluster, training.graph)
    exact = replace(training, constraints=replace(constraints, tolerance=0.0))
    within = plan.prediction.step_seconds * (1 + constraints.tolerance)
    best: Fewer | None = None
    for count in _counts(cluster, plan, within):
        found = _fastest_below(within, exact, first_devices(cluster, count), prices)
        if found is not None:
            within = found.prediction.step_seconds
            best = Fewer(devices=count, step_seconds=within)
    return best


def _counts(cluster: Cluster, plan: Plan, within: float) -> Iterator[int]:
    """Yield numbers of devices to try, the most first.

    Numbers whose step would take too long even at 90 % of their peak FLOPs are left out.
    """
    prediction, every = plan.prediction, prefix_sizes(cluster)
    least = prediction.mfu / _SHARE_OF_PEAK * plan.machines.devices
    least *= prediction.step_seconds / within
    powers = range(1, cluster.size.bit_length())
    wanted = {2**power for power in powers} | {cluster.size // 2**power for power in powers} | {1}
    if len(cluster.nodes) > 1:
        wanted.add(every[-2])
    most = (1 - _LEAST_SAVED) * cluster.size
    wanted = {count for count in wanted if count in every[:-1] and count <= most}
    yield from sorted((count for count in wanted if count >= least), reverse=True)[:_MOST_COUNTS]


def _fastest_below(
    seconds: float, training: Training, cluster: Cluster, prices: Prices | None
) -> Candidate | None:
    """Return the fastest plan with a step of at most `seconds` from a short search, or None."""
    subject = SearchSubject(graph=training.graph, axes=training.axes, layers=training.layers)
    explorer = Explorer(
        subject, cluster, training.constraints, measured=training.measured, prices=prices
    )
    explorer.know(seconds)

    def near(entries: Iterable[Entry]) -> Iterator[Entry]:
        return (
            one
            for one in entries
            if (one.value if isinstance(one, FoundLeaf) else one.bound) <= seconds
        )

    looked = iter(range(_MOST_NODES))
    try:
        roots = [one for one in near(explorer.roots()) if isinstance(one, SearchNode)]
    except InfeasibleError:  # there are no degrees for so many devices
        return None
    found = best_first(
        roots,
        lambda item: near(explorer.expand(item)),
        is_late=lambda: next(looked, None) is None,
    ).found
    return found[0].leaf if found else None
