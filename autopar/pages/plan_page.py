"""Turns a plan into the page that `autopar plan` prints: the best plans, and the proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.pages.tables import plain_table, rate_text
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.chosen import chosen
from autopar.planner.plan.telling.explanation import Part, part_seconds, proof_line
from autopar.planner.plan.telling.words import (
    batch_words,
    degrees_words,
    nodes_words,
    recompute_words,
    schedule_words,
    sharding_words,
    unit_word,
    units_per_second,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One plan of the table, the chosen one or another."""

    arrangement: Arrangement
    recompute: str
    step_seconds: float
    mfu: float
    device_bytes: int
    communication_seconds: float
    idle_seconds: float
    difference: str


def plan_page(plan: Plan) -> Iterator[RenderableType]:
    """Yield the page from top to bottom."""
    yield _head(plan)
    yield _table(plan)
    yield Text(proof_line(plan))


def _head(plan: Plan) -> Text:
    machines = plan.machines
    arguments = ", ".join(f"{key}={value}" for key, value in plan.model.arguments)
    model = f"{plan.model.spec} ({arguments})" if arguments else plan.model.spec
    nodes = f"{machines.nodes} nodes" if machines.nodes > 1 else "1 node"
    lines = [
        f"{machines.devices} × {machines.device} on {nodes}, "
        f"{_limits(plan)}"
        + (f", {machines.usd_per_hour:.4g} USD an hour" if machines.usd_per_hour else ""),
        *([] if plan.cluster.has_equal_nodes else [f"node ranks: {nodes_words(plan)}"]),
        f"global batch {plan.arrangement.global_batch:,}, {plan.arrangement.precision}, "
        f"least {plan.objective}",
        *(f"declared: {one}" for one in plan.constraints),
        f"chosen: {'; '.join(chosen(plan))}",
    ]
    return Text.assemble((model, "bold"), "\n", "\n".join(lines), "\n")


def _limits(plan: Plan) -> str:
    """Return what a rank may use of its device, of each kind where devices are unlike."""
    machines, devices = plan.machines, {one.name: one for one in plan.cluster.devices}
    if not machines.limits:
        limit, memory = bytes_text(machines.limit_bytes), bytes_text(machines.memory_bytes)
        return f"{limit} of {memory} to use on each"
    each = (
        f"{bytes_text(limit)} of {bytes_text(devices[name].memory_bytes)} of {name}"
        for name, limit in machines.limits
    )
    return f"{', '.join(each)} to use"


def _table(plan: Plan) -> Table:
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


def _rows(plan: Plan) -> Iterator[_Row]:
    prediction = plan.prediction
    yield _Row(
        arrangement=plan.arrangement,
        recompute=recompute_words(plan.stages),
        step_seconds=prediction.step_seconds,
        mfu=prediction.mfu,
        device_bytes=prediction.peak_memory.device_bytes,
        communication_seconds=part_seconds(prediction, Part.COMMUNICATION),
        idle_seconds=part_seconds(prediction, Part.BUBBLE),
        difference="",
    )
    fastest = (plan.fastest,) if plan.fastest is not None else ()
    for other in (*fastest, *plan.runners_up):
        told = other.difference
        yield _Row(
            arrangement=other.arrangement,
            recompute=other.recompute,
            step_seconds=other.step_seconds,
            mfu=other.mfu,
            device_bytes=other.device_bytes,
            communication_seconds=other.communication_seconds,
            idle_seconds=other.idle_seconds,
            difference=f"the fastest: {told}" if other in fastest else told,
        )


def _plan_text(row: _Row) -> Text:
    """Return degrees, how a rank works, and what sets the plan apart, a line each."""
    one = row.arrangement
    first = [degrees_words(one), sharding_words(one) if one.data > 1 else "", schedule_words(one)]
    second = [batch_words(one), "" if row.recompute == "none" else f"recompute {row.recompute}"]
    lines = [", ".join(part for part in line if part) for line in (first, second)]
    text = Text("\n".join(lines))
    if row.difference:
        text.append(f"\n{row.difference}", style="italic")
    return text
