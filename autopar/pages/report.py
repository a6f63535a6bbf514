"""The report of a plan, and of a run of it: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autopar.pages.charts import Row, color, marks, name, number, rule
from autopar.pages.figures import Figure, plan_figures
from autopar.pages.plan_page import figure_text
from autopar.planner.cluster.toml_reading import bytes_text, seconds_text
from autopar.planner.files import refuse_others, write_whole
from autopar.planner.plan.plan import StoredPlan
from autopar.planner.plan.telling.explanation import (
    explain,
    proof_line,
)
from autopar.planner.plan.telling.words import (
    arrangement_words,
    recompute_words,
    unit_word,
    units_per_second,
)
from autopar.runs.run_metrics import AnalyzedRun, analyze_run
from autopar.runtime.ranks.metrics import Event

BEGINNING = "<!DOCTYPE html>\n<!-- written by autopar report -->"
# docs/planner.md has the same table
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "MFU": "model FLOPs utilisation: the FLOPs that a step needs, without recomputation, as a "
        "share of what the devices can do in its time at their peak",
        "exposed": "of a message: the part of its time in which nothing is computed beside it",
        "data parallel": "messages between data ranks: gradients, and parameters that ZeRO gathers",
        "tensor communication": "messages between tensor ranks, inside layers",
        "bubble": "the time in which ranks of a pipeline wait for each other",
        "host overhead": "the time that Python and torch take on the CPU while the device waits",
        "in flight": "microbatches whose forward has been done and whose backward has not",
        "activations": "tensors that forwards keep for backwards, of all microbatches in flight",
        "work space": "tensors that are there only while a layer is computed, such as logits",
        "temporary copies": "parameters that ZeRO has gathered, and gradients until they are added",
        "fragments": "memory that torch's allocator holds without a tensor in it",
        "context": "what the device's driver and the communication libraries take",
        "arrangement": "degrees of pipeline, data and tensor ranks, rows of a microbatch, schedule "
        "and ZeRO level: one point of the search",
        "pruned by bound": "not solved, because no plan of this arrangement can be better than one "
        "that was found",
    }
)
_MOST_POINTS = 1000  # about so many points of a curve are drawn
_Point: TypeAlias = tuple[str, int, float]  # kind, step, value


def report(plan: StoredPlan, run: AnalyzedRun | None = None) -> str:
    """Return the text of a report."""
    page = Environment(
        loader=PackageLoader("autopar.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    why = explain(plan)
    counts = [_counts(plan)] if plan.curve else []
    measured = [_measured(run), *_curves(plan, run)] if run else []
    figures = [*measured, *counts, *plan_figures(plan, why), _words()]
    return page.get_template("report.html.j2").render(
        beginning=Markup(BEGINNING),
        title=f"{plan.model.name} on {plan.machines.devices} × {plan.machines.device}",
        arrangement=arrangement_words(plan.arrangement),
        recompute=recompute_words(plan.stages),
        facts=_facts(plan),
        reasons=why.reasons,
        figures=figures,
        proof=proof_line(plan),
    )


def write_report(plan: StoredPlan, path: Path, run: Path | None) -> None:
    """Draw a plan, and a run of it, into a file; raise if another program's file is there."""
    refuse_others(path, beginning=BEGINNING)
    analyzed = None if run is None else analyze_run(plan, run)
    write_whole(path, report(plan, analyzed), what="the report")


def _facts(plan: StoredPlan) -> Iterator[tuple[str, str]]:
    prediction, (rank, memory) = plan.prediction, plan.fullest
    step = prediction.step_seconds
    rate = units_per_second(plan.arrangement, plan.model, step)
    yield "step", seconds_text(step)
    yield f"{unit_word(plan.model)} a second", figure_text(rate, "1/s")
    yield "MFU", f"{prediction.mfu:.1%}"
    share = memory.device_bytes / plan.limit_bytes(rank)
    yield f"fullest device, {share:.0%} of its limit", bytes_text(memory.device_bytes)
    yield "rows of a step", f"{plan.arrangement.global_batch:,}"
    yield "no plan is faster by more than", f"{max(0.0, plan.proof.gap):.2%}"


def _words() -> Figure:
    return Figure(
        title="Words",
        text="What the names of figures mean, here and in what autopar prints.",
        head=("name", "meaning"),
        rows=tuple(WORDS.items()),
    )


def _counts(plan: StoredPlan) -> Figure:
    """Return a figure with the best plan for each number of devices that was asked for."""
    unit, first = unit_word(plan.model), plan.curve[0]
    rates = [units_per_second(one.arrangement, plan.model, one.step_seconds) for one in plan.curve]
    linear = [rates[0] * one.arrangement.ranks / first.arrangement.ranks for one in plan.curve]
    words = [arrangement_words(one.arrangement) for one in plan.curve]
    rows = [
        {
            "kind": "chosen" if one.arrangement == plan.arrangement else "others",
            "devices": one.arrangement.ranks,
            "rate": rate,
            "words": f"on {one.arrangement.ranks}: {text}: {seconds_text(one.step_seconds)} a step",
        }
        for one, rate, text in zip(plan.curve, rates, words, strict=True)
    ]
    straight: list[Row] = [
        {
            "devices": row["devices"],
            "rate": rate,
            "words": "if each device added as much as the first ones",
        }
        for row, rate in zip(rows, linear, strict=True)
    ]
    devices, log = [row["devices"] for row in rows], {"type": "log", "base": 2, "nice": False}
    kinds = [one for one in ("chosen", "others") if any(row["kind"] == one for row in rows)]
    encoding = {
        "x": number("devices", "", axis={"title": "devices", "values": devices}, scale=log),
        "y": number("rate", "", axis={"title": f"{unit} a second", "format": "~s"}, scale=log),
    }
    points = {**encoding, "color": color("kind", kinds)}
    dashes: list[int] = [5, 4]
    return Figure(
        title="Numbers of devices",
        text="What the best plan for each number of devices does in a second. On the dashed line, "
        "each device would add as much as the first ones.",
        layers=(
            marks("line", straight, encoding, strokeDash=dashes, color="var(--ink)"),
            marks("line", rows, encoding, color="var(--c2)"),
            marks("point", rows, points, size=110, filled=True),
        ),
        height=240,
        head=("devices", "arrangement", "step", f"{unit} a second", "efficiency", "USD an hour"),
        rows=tuple(
            (
                f"{one.arrangement.ranks:,}" + (" (chosen)" if row["kind"] == "chosen" else ""),
                text,
                seconds_text(one.step_seconds),
                figure_text(rate, "1/s"),
                f"{rate / ideal:.0%}",
                "" if one.usd_per_hour is None else f"{one.usd_per_hour:,.2f}",
            )
            for one, row, text, rate, ideal in zip(
                plan.curve, rows, words, rates, linear, strict=True
            )
        ),
    )


def _measured(run: AnalyzedRun) -> Figure:
    found = run.analysis
    rows = [
        {
            "name": one.name,
            "ratio": one.measured / one.predicted,
            "words": f"{one.name}: {figure_text(one.measured, one.unit)} measured, "
            f"{figure_text(one.predicted, one.unit)} predicted",
        }
        for one in (*found.figures, *found.ranks)
        if one.predicted
    ]
    encoding = {"y": name("name"), "x": number("ratio", "measured ÷ predicted")}
    on_planned = "" if found.is_on_planned_device else " It ran on another device than planned for."
    return Figure(
        title="Measured and predicted",
        text=f"Medians of {found.compared_steps} steps of the run, and the prediction.{on_planned}",
        layers=(
            marks("bar", rows, encoding, color="var(--c1)"),
            rule(1.0, "as predicted", axis="x"),
        ),
        height={"step": 26},
        head=("figure", "measured", "predicted", "ratio"),
        rows=tuple(
            (
                one.name,
                figure_text(one.measured, one.unit),
                figure_text(one.predicted, one.unit),
                f"{one.measured / one.predicted:.2f}" if one.predicted else "",
            )
            for one in (*found.figures, *found.ranks)
        ),
    )


def _curves(plan: StoredPlan, run: AnalyzedRun) -> Iterator[Figure]:
    step = plan.prediction.step_seconds
    losses = [
        ("evaluation" if one.get("event") == Event.EVALUATED else "training", one, "loss")
        for one in run.lines
        if one.get("event") in (None, Event.EVALUATED)
    ]
    seconds = [("measured", one, "seconds") for one in run.lines if one.get("event") is None]
    for title, text, found, line in (
        ("Loss", "The loss of the training and of its evaluations.", losses, None),
        ("Seconds of a step", "The dashed line is the prediction.", seconds, step),
    ):
        points = [
            (kind, int(one["step"]), float(one[key]))
            for kind, one, key in found
            if isinstance(one.get(key), int | float)
        ]
        if points:
            kinds = dict.fromkeys(kind for kind, _, _ in points)
            each = ([one for one in points if one[0] == kind] for kind in kinds)
            yield _curve(title, text, [one for own in each for one in _thinned(own)], line)


def _thinned(points: Sequence[_Point]) -> Sequence[_Point]:
    """Return evenly spread points, with the last one."""
    return points[:: -(len(points) // _MOST_POINTS + 1)][::-1]


def _curve(title: str, text: str, points: Sequence[_Point], line: float | None) -> Figure:
    rows: list[Row] = [
        {"kind": kind, "step": step, "value": value, "words": f"step {step}: {kind} {value:.4g}"}
        for kind, step, value in points
    ]
    encoding = {
        "x": number("step", "step", axis={"title": "step", "tickMinStep": 1}),
        "y": number("value", title.lower(), scale={"zero": False}),
        "color": color("kind", list(dict.fromkeys(kind for kind, _, _ in points))),
    }
    predicted = (rule(line, f"predicted: {seconds_text(line)}"),) if line else ()
    return Figure(
        title=title,
        text=text,
        layers=(marks("line", rows, encoding, point=True), *predicted),
        height=220,
        head=("", "step", "value"),
        rows=tuple((kind, str(step), f"{value:.4g}") for kind, step, value in points),
    )
