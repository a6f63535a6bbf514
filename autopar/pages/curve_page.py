"""Turns a curve over numbers of devices into the table that `autopar plan --gpus 1,2,4` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.pages.tables import plain_table, rate_text
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.plan.fleet.choosing import Choice, time_text, usd_text
from autopar.planner.plan.fleet.curve import Curve, Point
from autopar.planner.plan.telling.words import (
    degrees_words,
    recompute_words,
    schedule_words,
    sharding_words,
    unit_word,
)

_KNEE = (
    "the knee: up to there a step that is 1 % shorter costs less than 1 % more{beyond}. "
    "--objective step-time takes the fastest, cost the cheapest"
)


def curve_page(curve: Curve, choice: Choice) -> Iterator[RenderableType]:
    """Yield the table of all numbers of devices, and which was chosen and why."""
    yield _table(curve, choice)
    refused = [one for one in curve.trials if one.plan is None]
    if refused:
        yield Text("\n".join(f"{one.devices} devices: {one.refusal}" for one in refused) + "\n")
    is_last = choice.point is curve.points[-1]
    knee = _KNEE.format(beyond=", and so it may be beyond" if is_last else ", beyond it more")
    why = knee if choice.is_knee else choice.why
    yield Text(f"Chosen: {_devices(choice.point)}, {why}.\n")


def _table(curve: Curve, choice: Choice) -> Table:
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


def _cells(point: Point, unit: str) -> Mapping[str, str]:
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


def _plan_words(point: Point) -> str:
    """Return a plan in few words: what it splits and shards, and whether it computes again."""
    arranged, again = point.plan.arrangement, recompute_words(point.plan.stages)
    parts = (
        degrees_words(arranged),
        sharding_words(arranged) if arranged.data > 1 else "",
        schedule_words(arranged),
        "" if again == "none" else f"recompute {again}",
    )
    return ", ".join(part for part in parts if part)


def _marks(point: Point, curve: Curve) -> Iterator[str]:
    for name, one in (
        ("knee", curve.knee), ("fastest", curve.fastest), ("cheapest", curve.cheapest),
    ):  # fmt: skip
        if one is point:
            yield name


def work_text(point: Point) -> str:
    """Return what the whole training takes and costs; nothing where its length is not known."""
    if point.training_seconds is None:
        return ""
    usd = "" if point.training_usd is None else f" and {usd_text(point.training_usd)}"
    return f"The whole training: {time_text(point.training_seconds)}{usd} on {_devices(point)}."


def _devices(point: Point) -> str:
    return f"{point.devices} device{'s' if point.devices > 1 else ''}"


def curve_json(curve: Curve) -> list[dict[str, object]]:
    """Return the curve for programs, one object for each number of devices."""
    by_size = {one.devices: one for one in curve.points}
    return [
        {"devices": trial.devices, "refusal": trial.refusal}
        if trial.devices not in by_size
        else _point_json(by_size[trial.devices], curve)
        for trial in curve.trials
    ]


def _point_json(point: Point, curve: Curve) -> dict[str, object]:
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
