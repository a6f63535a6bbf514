"""Turns an explanation of a plan into the page that a person reads, section by section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.pages.tables import bar, plain_table
from autopar.planner.cluster.units import bytes_text, seconds_text
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.explanation import Explanation, term_percents
from autopar.planner.plan.telling.percents import added_up
from autopar.planner.plan.telling.split_lines import ClassLayouts
from autopar.planner.plan.telling.words import arrangement_words, recompute_words
from autopar.planner.plan.why_not import WhyNot


def explanation_page(plan: Plan, explanation: Explanation) -> Iterator[RenderableType]:
    """Yield everything, from top to bottom."""
    yield _head(plan, explanation)
    yield _time(plan)
    yield stage_table(plan, explanation)
    yield memory_table(explanation, fullest_stage(explanation))
    yield communication_table(plan)
    yield from layout_parts(explanation)
    yield Text(explanation.proof)


def _head(plan: Plan, explanation: Explanation) -> Text:
    step = seconds_text(plan.prediction.step_seconds)
    lines = [
        f"{arrangement_words(plan.arrangement)}; recompute {recompute_words(plan.stages)}",
        f"step {step}, MFU {plan.prediction.mfu:.1%}",
        *(f"- {reason}" for reason in explanation.reasons),
    ]
    title = f"{plan.model.name} on {plan.machines.devices} × {plan.machines.device}"
    return Text.assemble((title, "bold"), "\n", "\n".join(lines), "\n")


def _time(plan: Plan) -> Table:
    table = plain_table("Where the step goes", "term", "", "time", "share", "from", left=2)
    step = plan.prediction.step_seconds
    percents = term_percents(plan.prediction)
    for term, percent in zip(plan.prediction.terms, percents, strict=True):
        share = term.seconds / step
        source = str(term.provenance)
        seconds = seconds_text(term.seconds) if term.seconds else "0"
        table.add_row(term.name, bar(share), seconds, f"{percent}%", source)
    return table


def stage_table(plan: Plan, explanation: Explanation, only: int | None = None) -> Table:
    """Return the stages, or one of them: layers, seconds of a microbatch, idleness, memory."""
    table = plain_table(
        "Stages, seconds of one microbatch",
        "stage", "rank", "layers", "recompute", "forward", "backward", "idle", "flight", "memory",
        left=4,
    )  # fmt: skip
    for number, (stage, cost) in enumerate(zip(plan.stages, plan.prediction.stages, strict=True)):
        if only not in (None, number):
            continue
        critical = " critical" if number == explanation.critical_stage else ""
        table.add_row(
            f"{number}{critical}",
            str(stage.rank),
            f"{stage.first} … {stage.first + stage.count - 1}",
            recompute_words([stage]),
            seconds_text(cost.forward_seconds),
            seconds_text(cost.backward_seconds),
            f"{cost.idle_seconds / plan.prediction.step_seconds:.0%}",
            str(cost.in_flight),
            bytes_text(cost.memory.device_bytes),
        )
    return table


def fullest_stage(explanation: Explanation) -> int:
    """Return the stage whose rank holds most."""
    return max(explanation.memory, key=lambda one: one.device_bytes).stage


def memory_table(explanation: Explanation, only: int | None = None) -> Table:
    """Return what the rank of each stage holds, by category, as bars of the limit."""
    table = plain_table("Memory of a device", "stage", "category", "", "bytes", "of limit", left=3)
    for one in explanation.memory:
        if only not in (None, one.stage):
            continue
        held = [(category, size) for category, size in one.categories if size]
        shares = [size * one.share_of_limit / one.device_bytes for _, size in held]
        tenths = added_up(shares, units=1000)  # of a percent
        for number, (category, size) in enumerate(held):
            stage, share = "" if number else str(one.stage), f"{tenths[number] / 10:.1f}%"
            table.add_row(stage, category, bar(shares[number]), bytes_text(size), share)
        table.add_row(
            "",
            "together",
            bar(one.share_of_limit),
            bytes_text(one.device_bytes),
            f"{one.share_of_limit:.1%}",
            end_section=True,
        )
    return table


def communication_table(plan: Plan) -> RenderableType:
    """Return what the busiest rank sends in one step, and why."""
    if not plan.prediction.communication:
        return Text("No communication.\n")
    table = plain_table(
        "Communication of the busiest rank in one step",
        "reason", "collective", "ranks", "times", "bytes", "time", "exposed", left=2,
    )  # fmt: skip
    for term in plan.prediction.communication:
        table.add_row(
            term.reason,
            term.collective,
            str(term.ranks),
            str(term.count or ""),
            bytes_text(term.payload_bytes) if term.payload_bytes else "",
            seconds_text(term.seconds),
            seconds_text(term.exposed_seconds) if term.exposed_seconds else "0",
        )
    return table


def layout_parts(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield what each class of layers splits on the tensor axis, and what it converts."""
    split = [one for one in explanation.layouts if one.splits or one.conversions]
    for one in split:
        yield _splits(one)
        if one.conversions:
            yield _conversions(one)
    if not split:
        yield Text("Nothing is split on the tensor axis.\n")


def _splits(one: ClassLayouts) -> Table:
    title = f"{one.name} ({one.first or 'the model'}), {one.layers} × : what is split"
    table = plain_table(title, "module", "op", "along", "gives", "times", left=4)
    lines = Counter((line.module, line.op, line.axis, line.gives) for line in one.splits)
    for parts, count in lines.items():
        table.add_row(*(Text(part) for part in parts), str(count))
    if rest := one.ops - len(one.splits):
        table.add_row("", f"{rest} other ops", "not split", "", "")
    return table


def _conversions(one: ClassLayouts) -> Table:
    table = plain_table(
        f"{one.name}: conversions between them",
        "before", "tensor is", "needed", "forward", "backward", left=5,
    )  # fmt: skip
    for line in one.conversions:
        parts = (line.module, line.produced, line.needed, line.forward, line.backward)
        table.add_row(*(Text(part) for part in parts))
    return table


def why_not_page(answer: WhyNot) -> Text:
    """Return the answer to --why-not."""
    lines = [f"- {reason}" for reason in answer.reasons]
    other = answer.alternative
    if other is not None:
        lines.insert(0, f"  {arrangement_words(other.arrangement)}; recompute {other.recompute}")
        if other.difference:
            lines.append(f"- {other.difference}")
    return Text.assemble((f"Why not {answer.wanted}?", "bold"), "\n", "\n".join(lines))
