"""Lays out the pages of `autopar explain` and `autopar diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.pages.plan_page import bar, figure_text, plain_table
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.costs.schedules.orders import ActionKind
from autopar.planner.plan.plan import ClassLayouts, StoredPlan
from autopar.planner.plan.telling.comparison import Change, ComparedFigure, PlanComparison
from autopar.planner.plan.telling.explanation import Explanation, term_percents
from autopar.planner.plan.telling.timeline import ACTION_WORDS, timeline_of
from autopar.planner.plan.telling.words import added_up, arrangement_words, recompute_words
from autopar.planner.plan.why_not import WhyNot
from autopar.runs.run_metrics import Analysis, RunFigure


def explanation_page(plan: StoredPlan, explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the page of `autopar explain`."""
    yield _head(plan, explanation)
    yield _time(plan)
    yield stage_table(plan, explanation)
    yield memory_table(explanation, fullest_stage(explanation))
    yield communication_table(plan)
    yield from layout_parts(explanation)
    yield Text(explanation.proof)


def _head(plan: StoredPlan, explanation: Explanation) -> Text:
    step = seconds_text(plan.prediction.step_seconds)
    lines = [
        f"{arrangement_words(plan.arrangement)}; recompute {recompute_words(plan.stages)}",
        f"step {step}, MFU {plan.prediction.mfu:.1%}",
        *(f"- {reason}" for reason in explanation.reasons),
    ]
    title = f"{plan.model.name} on {plan.machines.devices} × {plan.machines.device}"
    return Text.assemble((title, "bold"), "\n", "\n".join(lines), "\n")


_LEAST_SHOWN = 1e-5  # of the step


def _time(plan: StoredPlan) -> Table:
    table = plain_table("Where the step goes", "term", "", "time", "share", "from", left=2)
    step = plan.prediction.step_seconds
    percents = term_percents(plan.prediction)
    for term, percent in zip(plan.prediction.terms, percents, strict=True):
        share = term.seconds / step
        if share < _LEAST_SHOWN:
            continue
        source = str(term.provenance)
        seconds = seconds_text(term.seconds) if term.seconds else "0"
        table.add_row(term.name, bar(share), seconds, f"{percent}%", source)
    return table


def stage_table(plan: StoredPlan, explanation: Explanation, only: int | None = None) -> Table:
    """Return a table of all stages or one: layers, seconds of a microbatch, idle time, memory."""
    table = plain_table(
        "Stages, seconds of one microbatch",
        "stage", "rank", "layers", "recompute", "forward", "backward", "idle", "in flight",
        "memory", left=4,
    )  # fmt: skip
    for number, (stage, cost) in enumerate(zip(plan.stages, plan.prediction.stages, strict=True)):
        if only not in (None, number):
            continue
        critical = " critical" if number == explanation.critical_stage else ""
        table.add_row(
            f"{number}{critical}",
            str(stage.rank),
            " … ".join(dict.fromkeys(map(str, (stage.first, stage.first + stage.count - 1)))),
            recompute_words([stage]),
            seconds_text(cost.forward_seconds),
            seconds_text(cost.backward_seconds),
            f"{cost.idle_seconds / plan.prediction.step_seconds:.0%}",
            str(cost.in_flight),
            bytes_text(cost.memory.device_bytes),
        )
    return table


_COLUMNS = 70  # characters of a rank's schedule; with its number, a line has at most 80


def timeline_page(plan: StoredPlan) -> Text:
    """Return a line for each pipeline rank: what it runs, from left to right, to scale."""
    timeline = timeline_of(plan)
    lines = [["·"] * _COLUMNS for _ in range(plan.arrangement.pipeline)]
    column_seconds = timeline.pipeline_seconds / _COLUMNS
    for one in timeline.actions:
        first, end = (round(at / column_seconds) for at in (one.start_seconds, one.end_seconds))
        letter = one.kind.lower() if one.microbatch % 2 else one.kind.upper()
        lines[one.rank][first:end] = letter * (end - first)
    kinds = {one.kind for one in timeline.actions}
    words = ", ".join(f"{kind} {ACTION_WORDS[kind]}" for kind in ActionKind if kind in kinds)
    of_all = "" if timeline.is_whole else f"of the {plan.arrangement.microbatches} "
    rest = "" if timeline.is_whole else ", the others repeat these"
    count = timeline.microbatches
    head = (
        f"{plan.arrangement.schedule}, {count} {of_all}"
        f"{'microbatch' if count == 1 else 'microbatches'}{rest}; "
        f"{seconds_text(timeline.pipeline_seconds)} from left to right\n"
        f"{words}, · waits; small letters are odd microbatches\n"
    )
    return Text(
        head + "".join(f"rank {rank:<3} {''.join(line)}\n" for rank, line in enumerate(lines))
    )


def fullest_stage(explanation: Explanation) -> int:
    """Return the stage with the fullest rank."""
    return max(explanation.memory, key=lambda one: one.device_bytes).stage


def memory_table(explanation: Explanation, only: int | None = None) -> Table:
    """Return a table of the memory of each stage's rank by category; a full bar is the limit."""
    table = plain_table("Memory of a device", "stage", "category", "", "bytes", "of limit", left=3)
    for one in explanation.memory:
        if only not in (None, one.stage):
            continue
        held = [(category, size) for category, size in one.categories if size]
        shares = [size * one.share_of_limit / one.device_bytes for _, size in held]
        tenths = added_up(shares, units=1000)  # in tenths of a percent
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


def communication_table(plan: StoredPlan) -> RenderableType:
    """Return a table of the busiest rank's collectives in one step, with their reasons."""
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
    """Yield the splits and conversions of each class of layers on the tensor axis."""
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
        table.add_row("", f"{rest} other {'op' if rest == 1 else 'ops'}", "not split", "", "")
    return table


def _conversions(one: ClassLayouts) -> Table:
    table = plain_table(
        f"{one.name}: conversions between layouts",
        "for module", "tensor is", "needed", "forward", "backward", left=5,
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


def comparison_page(comparison: PlanComparison, names: tuple[str, str]) -> Iterator[RenderableType]:
    """Yield the page of `autopar diff`; `names` are the names of the two plans."""
    for warning in comparison.warnings:
        yield Text.assemble(("warning: ", "bold yellow"), warning)
    if comparison.changes:
        yield _changes("What changed", comparison.changes, names)
    else:
        yield Text("The same degrees, schedule, sharding, recompute and stages.")
    if comparison.layouts:
        yield _changes("What is split on the tensor axis", comparison.layouts, names)
    yield _figures(comparison.figures, names)


def _changes(title: str, changes: tuple[Change, ...], names: tuple[str, str]) -> Table:
    table = plain_table(title, "", *names, left=3)
    for change in changes:
        table.add_row(*(Text(part) for part in (change.what, change.before, change.after)))
    return table


def _figures(figures: tuple[ComparedFigure, ...], names: tuple[str, str]) -> Table:
    table = plain_table("Predicted figures", "", *names, "change")
    for one in figures:
        if one.before or one.after:
            texts = (figure_text(one.before, one.unit), figure_text(one.after, one.unit))
            table.add_row(one.name, *texts, _change(one))
    return table


def _change(one: ComparedFigure) -> str:
    if not one.before or one.before == one.after:
        return "" if one.before == one.after else "new"
    return f"{one.after / one.before - 1:+.1%}"


def analysis_page(plan: StoredPlan, found: Analysis) -> Iterator[RenderableType]:
    """Yield the page of a run: predicted and measured figures, and advice if a step is far off."""
    yield _side_by_side("Predicted and measured", found.figures)
    if found.ranks:
        yield _side_by_side(f"Step {found.profiled_step:,}, which was profiled", found.ranks)
    spread = f"{seconds_text(found.fastest_seconds)} to {seconds_text(found.slowest_seconds)}"
    lines = "1 step line" if found.compared_steps == 1 else f"{found.compared_steps} step lines"
    yield Text(f"Medians of {lines}; their steps took {spread}.")
    if found.keeping_seconds is not None:
        yield Text(f"For a checkpoint, steps waited {seconds_text(found.keeping_seconds)}.")
    if not found.is_on_planned_device:
        device = plan.machines.device
        yield Text(
            f"The plan is for {device}, but the run was on another device, so its times "
            "say nothing about the predictions."
        )
        return
    step = found.figures[0]
    if step.is_far_off:
        yield Text(_advice(step, plan, is_profiled=bool(found.ranks)))


def _side_by_side(title: str, figures: Sequence[RunFigure]) -> RenderableType:
    table = plain_table(title, "", "predicted", "measured", "off by", "")
    for one in figures:
        texts = (figure_text(value, one.unit) for value in (one.predicted, one.measured))
        flag = Text("more than a quarter", style="red") if one.is_far_off else ""
        table.add_row(one.name, *texts, f"{one.error:+.0%}", flag)
    return table


def _advice(step: RunFigure, plan: StoredPlan, *, is_profiled: bool) -> str:
    terms = sorted(plan.prediction.terms, key=lambda term: -term.seconds)[:3]
    made = ", ".join(f"{one.name} {seconds_text(one.seconds)}" for one in terms if one.seconds)
    slower = "slower" if step.error > 0 else "faster"
    more = "" if is_profiled else "A run with --profile-step 20 tells which ranks wait. "
    return (
        f"Steps are {slower} than planned by more than a quarter. The largest predicted "
        f"terms are {made}. {more}`autopar profile` measures ops and links on this machine, and "
        "`autopar plan --profile` plans by that. If the devices wait for rows, --workers reads "
        "ahead."
    )
