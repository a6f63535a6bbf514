"""Lays out the pages of a plan, and of plans for several numbers of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.plan.declared.constraints import Objective, constraints_of
from autopar.planner.plan.fleet import ChosenPoint, Curve, CurvePoint, time_text, usd_text
from autopar.planner.plan.plan import RunnerUp, StoredPlan
from autopar.planner.plan.telling.explanation import StepPart, part_seconds, proof_line
from autopar.planner.plan.telling.words import (
    batch_words,
    chosen,
    compile_words,
    degrees_words,
    local_words,
    nodes_words,
    offload_words,
    recompute_words,
    schedule_words,
    sharding_words,
    unit_word,
    units_per_second,
)

_BAR_WIDTH = 24  # characters
_WIDE = 100  # characters; tables on narrower terminals have less padding


class _FittingTable(Table):
    """A table with less padding on a narrow terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width < _WIDE:
            self.padding, self.pad_edge, self.show_edge = (0, 1, 0, 0), False, False
        yield from super().__rich_console__(console, options)
        if not self.show_edge:
            yield Text()  # in place of an edge


def plain_table(title: str, *columns: str, left: int = 1) -> Table:
    """Return a table with a title, its first `left` columns aligned to the left.

    A column without a heading (a bar) is cut if there is no room.
    """
    table = _FittingTable(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for i, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if i < left else "right"
        is_bar = i > 0 and not column
        overflow: Literal["crop", "fold"] = "crop" if is_bar else "fold"
        table.add_column(column, justify=side, overflow=overflow, no_wrap=is_bar)
    return table


def bar(share: float) -> str:
    """Return a share as a bar; the bar of a share over 1 ends in "!"."""
    filled = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return "█" * filled + "░" * (_BAR_WIDTH - filled) + ("!" if share > 1 else "")


def rate_text(per_second: float) -> str:
    """Return a rate with its suffix: 12.4 k, 3.1 M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= limit:
            return f"{per_second / limit:.3g} {letter}"
    return f"{per_second:.3g}"


def figure_text(value: float, unit: str) -> str:
    """Return a figure in its unit: seconds, bytes, per second, money or a share."""
    if unit == "s":
        return seconds_text(value) if value else "0"
    if unit == "B":
        return bytes_text(value)
    if unit == "USD":
        return f"{value:.3g} USD"
    return rate_text(value) if unit == "1/s" else f"{value:.1%}"


def plan_page(plan: StoredPlan) -> Iterator[RenderableType]:
    """Yield the page of `autopar plan`."""
    yield _head(plan)
    yield _table(plan)
    yield Text(proof_line(plan))


def _head(plan: StoredPlan) -> Text:
    machines = plan.machines
    arguments = ", ".join(f"{key}={value}" for key, value in plan.model.arguments)
    model = f"{plan.model.spec} ({arguments})" if arguments else plan.model.spec
    nodes = f"{machines.nodes} nodes" if machines.nodes > 1 else "1 node"
    lines = [
        f"{machines.devices} × {machines.device} on {nodes}, "
        f"{_limits(plan)}"
        + (f", {machines.usd_per_hour:.4g} USD an hour" if machines.usd_per_hour else ""),
        *([] if plan.cluster.has_equal_nodes else [f"node ranks: {nodes_words(plan)}"]),
        f"global batch {plan.arrangement.global_batch:,}, {plan.arrangement.precision}",
        f"wanted: {_wanted(plan)}",
        *(f"declared: {one}" for one in plan.constraints),
        f"defaults: {'; '.join(chosen(plan))}",
    ]
    return Text.assemble((model, "bold"), "\n", "\n".join(lines), "\n")


def _wanted(plan: StoredPlan) -> str:
    """Return the objective in words, with the options that set it."""
    objective = Objective(plan.objective)
    tolerance = constraints_of(plan.constraints).tolerance
    if objective.memory_alone or not tolerance:
        return f"{objective.words} (--objective)"
    within = (
        f"the simplest plan whose step is at most {100 * tolerance:.3g}% longer than the shortest"
    )
    return f"{within} (--objective, --tolerance)"


def _limits(plan: StoredPlan) -> str:
    """Return how much memory a rank may use, for each kind of device."""
    machines, devices = plan.machines, {one.name: one for one in plan.cluster.devices}
    if not machines.limits:
        limit, memory = bytes_text(machines.limit_bytes), bytes_text(machines.memory_bytes)
        return f"{limit} of {memory} to use on each"
    each = (
        f"{bytes_text(limit)} of {bytes_text(devices[name].memory_bytes)} on {name}"
        for name, limit in machines.limits
    )
    return f"{', '.join(each)} to use"


def _table(plan: StoredPlan) -> Table:
    unit = unit_word(plan.model)
    table = plain_table(
        "The best plans" if plan.runners_up else "The plan",
        "", "plan", "step", f"{unit}/s", "MFU", "memory", "comm.", "bubble", left=2,
    )  # fmt: skip
    for number, row in enumerate(_rows(plan), start=1):
        step = row.step_seconds
        table.add_row(
            str(number),
            _plan_text(row),
            seconds_text(step),
            rate_text(units_per_second(row.arrangement, plan.model, step)),
            f"{row.mfu:.1%}",
            bytes_text(row.device_bytes),
            f"{row.communication_seconds / step:.0%}",
            f"{row.idle_seconds / step:.0%}",
            style="bold" if number == 1 else None,
        )
    return table


def chosen_row(plan: StoredPlan, difference: str = "") -> RunnerUp:
    """Return the chosen plan as a row among the other plans."""
    prediction = plan.prediction
    return RunnerUp(
        arrangement=plan.arrangement,
        recompute=recompute_words(plan.stages),
        step_seconds=prediction.step_seconds,
        mfu=prediction.mfu,
        device_bytes=prediction.peak_memory.device_bytes,
        communication_seconds=part_seconds(prediction, StepPart.COMMUNICATION),
        idle_seconds=part_seconds(prediction, StepPart.BUBBLE),
        difference=difference,
    )


def _rows(plan: StoredPlan) -> Iterator[RunnerUp]:
    """Yield the chosen plan, then the others; the fastest plan is marked if it was not chosen."""
    prediction = plan.prediction
    fastest = (plan.fastest,) if plan.fastest is not None else ()
    others = (*fastest, *plan.runners_up)
    least = min((one.step_seconds for one in others), default=prediction.step_seconds)
    is_fastest = prediction.step_seconds <= least
    why, of = ("", "") if is_fastest or fastest else ("chosen: the least memory", " of these")
    simpler = f"chosen: simpler, and {plan.slower_by:.1%} slower"
    yield chosen_row(plan, simpler if fastest else why)
    for other in others:
        is_marked = not is_fastest and other.step_seconds == least
        difference = f"the fastest{of}: {other.difference}"
        yield replace(other, difference=difference) if is_marked else other


def _plan_text(row: RunnerUp) -> Text:
    """Return the lines of a table's cell that describes a plan."""
    one = row.arrangement
    first = [degrees_words(one), sharding_words(one) if one.data > 1 else "", schedule_words(one)]
    again = "" if row.recompute == "none" else f"recompute {row.recompute}"
    second = [batch_words(one), one.compression.words, again, local_words(one)]
    second += [compile_words(one), offload_words(one)]
    lines = [", ".join(part for part in line if part) for line in (first, second)]
    text = Text("\n".join(lines))
    if row.difference:
        text.append(f"\n{row.difference}", style="italic")
    return text


_KNEE = (
    "the knee: up to it, a step that is 1 % shorter costs less than 1 % more{beyond}. "
    "--objective step-time takes the fastest, cost the cheapest"
)


def curve_page(curve: Curve, choice: ChosenPoint) -> Iterator[RenderableType]:
    """Yield the table of all numbers of devices, and a sentence why one was chosen."""
    yield _curve_table(curve, choice)
    refused = [one for one in curve.trials if one.plan is None]
    if refused:
        yield Text("\n".join(f"{one.devices} devices: {one.refusal}" for one in refused) + "\n")
    is_last = choice.point is curve.points[-1]
    more = ", and maybe beyond it" if is_last else "; beyond it, over 1 % more"
    knee = _KNEE.format(beyond=more)
    why = knee if choice.is_knee else choice.why
    yield Text(f"Chosen: {_devices(choice.point)}, {why}.\n")


def _curve_table(curve: Curve, choice: ChosenPoint) -> Table:
    unit = unit_word(curve.points[0].plan.model)
    has_price = all(one.units_per_usd is not None for one in curve.points)
    has_work = all(one.training_seconds is not None for one in curve.points)
    columns = [
        "devices", "step", "speed-up", "efficiency", f"{unit}/s",
        *([f"{unit}/USD"] if has_price else []),
        *(["training"] if has_work else []),
        *(["USD"] if has_work and has_price else []),
        "memory", "plan",
    ]  # fmt: skip
    table = plain_table("How many devices", *columns)
    for column in table.columns[:-1]:
        column.no_wrap = True
    table.columns[-1].justify = "left"
    by_size = {one.devices: one for one in curve.points}
    for trial in curve.trials:
        point = by_size.get(trial.devices)
        if point is None:
            bare = {"devices": str(trial.devices), "plan": "none (see below)"}
            table.add_row(*(bare.get(name, "") for name in columns))
            continue
        cells = _cells(point, unit)
        marks = ", ".join(_marks(point, curve))
        plan = Text(_plan_words(point))
        if marks:
            plan.append(f"\n{marks}", style="italic")
        row = (cells[name] for name in columns[:-1])
        table.add_row(*row, plan, style="bold" if point is choice.point else None)
    return table


def _cells(point: CurvePoint, unit: str) -> Mapping[str, str]:
    seconds, usd, per_usd = point.training_seconds, point.training_usd, point.units_per_usd
    return {
        "devices": str(point.devices),
        "step": seconds_text(point.step_seconds),
        "speed-up": f"{point.speedup:.2f}",
        "efficiency": f"{point.efficiency:.0%}",
        f"{unit}/s": rate_text(point.units_per_second),
        f"{unit}/USD": "" if per_usd is None else rate_text(per_usd),
        "training": "" if seconds is None else time_text(seconds),
        "USD": "" if usd is None else f"{usd:,.4g}",
        "memory": bytes_text(point.plan.prediction.peak_memory.device_bytes),
    }


def _plan_words(point: CurvePoint) -> str:
    """Return a plan in few words: degrees, sharding, schedule and recomputation."""
    arranged, again = point.plan.arrangement, recompute_words(point.plan.stages)
    parts = (
        degrees_words(arranged),
        sharding_words(arranged) if arranged.data > 1 else "",
        schedule_words(arranged),
        local_words(arranged),
        "" if again == "none" else f"recompute {again}",
    )
    return ", ".join(part for part in parts if part)


def _marks(point: CurvePoint, curve: Curve) -> Iterator[str]:
    for name, one in (
        ("knee", curve.knee),
        ("fastest", curve.best(Objective.STEP_TIME)),
        ("cheapest", curve.best(Objective.COST)),
    ):
        if one is point:
            yield name


def work_text(point: CurvePoint) -> str:
    """Return the time and cost of the whole training, or "" if its length is unknown."""
    if point.training_seconds is None:
        return ""
    usd = "" if point.training_usd is None else f" and {usd_text(point.training_usd)}"
    return f"The whole training: {time_text(point.training_seconds)}{usd} on {_devices(point)}."


def _devices(point: CurvePoint) -> str:
    return f"{point.devices} device{'s' if point.devices > 1 else ''}"


def curve_json(curve: Curve) -> list[dict[str, object]]:
    """Return the curve as JSON data, one object per number of devices."""
    by_size = {one.devices: one for one in curve.points}
    return [
        {"devices": trial.devices, "refusal": trial.refusal}
        if trial.devices not in by_size
        else _point_json(by_size[trial.devices], curve)
        for trial in curve.trials
    ]


def _point_json(point: CurvePoint, curve: Curve) -> dict[str, object]:
    return {
        "devices": point.devices,
        "step_seconds": point.step_seconds,
        "speedup": point.speedup,
        "efficiency": point.efficiency,
        f"{unit_word(point.plan.model)}_per_second": point.units_per_second,
        f"{unit_word(point.plan.model)}_per_usd": point.units_per_usd,
        "training_seconds": point.training_seconds,
        "training_usd": point.training_usd,
        "device_bytes": point.plan.prediction.peak_memory.device_bytes,
        "plan": _plan_words(point),
        "is": list(_marks(point, curve)),
    }
