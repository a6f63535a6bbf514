"""`autopar explain`, `diff`, `report` and `trace`: explain, compare and draw plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from autopar.commands import AS_JSON
from autopar.console import print_json, results, status_line
from autopar.options import CACHE, OUTPUT_FILE, PLAN, whole
from autopar.pages.explanation_page import (
    analysis_page,
    communication_table,
    comparison_page,
    explanation_page,
    layout_parts,
    memory_table,
    stage_table,
    timeline_page,
    why_not_page,
)
from autopar.planner.errors import InputError
from autopar.planner.files import refuse_others, write_whole
from autopar.planner.plan.declared.constraints import Constraints, constraints_of
from autopar.planner.plan.declared.file import parse_pins
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.plan import RunnerUp, StoredPlan
from autopar.planner.plan.telling.comparison import compare
from autopar.planner.plan.telling.explanation import Explanation, explain
from autopar.planner.plan.telling.timeline import (
    Timeline,
    measured_step,
    timeline_of,
    trace_events,
)
from autopar.planner.plan.traced import with_model
from autopar.planner.plan.why_not import WhyNot, why_not
from autopar.planner.profile.measured import read_measurements
from autopar.runs.run_metrics import Analysis, analyze_run, metrics_of
from autopar.runtime.ranks.metrics import PROFILES

TRACE_BEGINNING = '{"otherData": {"writer": "autopar"}, "displayTimeUnit": "ms", "traceEvents": ['


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="plan.json or its folder")],
    after: Annotated[Path, typer.Argument(metavar="B", help="plan.json or its folder")],
    as_json: AS_JSON = False,
) -> None:
    """Show what changed from plan A to plan B, and the effect on time, communication and memory.

    Example: autopar diff before/plan.json after/plan.json
    """
    one, other = read_plan(before), read_plan(after)
    comparison = compare(one, other)
    if as_json:
        print_json(asdict(comparison))
        return
    for part in comparison_page(comparison, (str(before), str(after))):
        results().print(part)


def report_plan(
    plan: PLAN,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run of this plan, or its metrics file."),
    ] = None,
    output: OUTPUT_FILE = Path("report.html"),
) -> None:
    """Draw a plan, and a run of it, as one HTML file that needs no network.

    It shows the plans that were compared, where a step's time goes, the schedule of each rank,
    memory, layers and messages. Of a run, it shows measured beside predicted figures, and curves.

    Example: autopar report plan.json runs/first -o report.html
    """
    from autopar.pages.report import write_report  # needs jinja2

    with status_line("drawing"):
        write_report(read_plan(plan), output, run)
    results().print(f"Written: {output}")


def trace_plan(
    plan: PLAN,
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run that profiled a step, or its metrics file."),
    ] = None,
    output: OUTPUT_FILE = Path("trace.json"),
) -> None:
    """Write the schedule of a plan as a trace for ui.perfetto.dev or chrome://tracing.

    With a run that has profiled a step (--profile-step), its forwards, backwards and kernels stand
    beside the predicted ones.

    Example: autopar trace plan.json -o trace.json
    """
    refuse_others(output, beginning=TRACE_BEGINNING)
    found = read_plan(plan)
    parts = [trace_events(timeline_of(found).actions, name="predicted")]
    if run is not None:
        measured = measured_step(found, metrics_of(run).parent / PROFILES)
        name = f"measured in step {measured.step:,}"
        parts += [trace_events(measured.actions, name=name, place=1), iter(measured.kernels)]
    events = ",\n".join(map(json.dumps, chain.from_iterable(parts)))
    write_whole(output, f"{TRACE_BEGINNING}\n{events}\n]}}\n", what="the trace")
    results().print(f"Written: {output}")


def explain_plan(
    plan: PLAN,
    stage: Annotated[
        int | None, whole("--stage", least=0, metavar="I", text="Only this stage, from 0.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Only the memory.")] = False,
    comm: Annotated[bool, typer.Option("--comm", help="Only communication and splits.")] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Only the schedule, a line for each rank.")
    ] = False,
    other: Annotated[
        str | None,
        typer.Option(
            "--why-not",
            metavar="KEY=VALUE,…",
            help="What another plan would cost, and why it was not chosen.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="For --why-not: the profile that the plan was made with.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FILE", help="For --why-not: the model file, if it has moved."
        ),
    ] = None,
    cache: CACHE = True,
    analyzed: Annotated[
        Path | None,
        typer.Option(
            "--analyze",
            metavar="RUN",
            help="Compare predicted and measured figures of a run (`autopar run`).",
        ),
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Show why a plan was chosen: time, stages, memory, communication, splits.

    Example: autopar explain out/plan.json --why-not tp=8
    """
    found = read_plan(plan)
    if stage is not None and stage >= len(found.stages):
        raise InputError(
            f"there is no stage {stage}", expected=f"0 to {len(found.stages) - 1}", where=str(plan)
        )
    if analyzed is not None:
        analysis = analyze_run(found, analyzed).analysis
        _print(analysis_page(found, analysis), analysis if as_json else None)
        return
    if other is not None:
        pins = constraints_of(parse_pins([other], option="--why-not"))
        measured = read_measurements(profile) if profile else None
        folder = plan if plan.is_dir() else plan.parent

        def solved(_: StoredPlan, constraints: Constraints) -> RunnerUp | str:
            # imported here, because answers from the plan's own figures need no solver
            from autopar.planner.plan.again import solve_point
            from autopar.planning import traced_plan

            traced = traced_plan(with_model(found, folder, model), folder, uses_cache=cache)
            with status_line("solving the other plan"):
                return solve_point(traced, constraints, measured=measured)

        answer = why_not(found, pins, solved)
        _print([why_not_page(answer)], answer if as_json else None)
        return
    if timeline:
        _print([timeline_page(found)], timeline_of(found) if as_json else None)
        return
    explanation = explain(found)
    parts = _chosen(found, explanation, stage=stage, memory=memory, comm=comm)
    _print(parts, explanation if as_json else None)


def _chosen(
    plan: StoredPlan, explanation: Explanation, *, stage: int | None, memory: bool, comm: bool
) -> Iterator[RenderableType]:
    """Yield the requested sections, or all of them."""
    if stage is None and not memory and not comm:
        yield from explanation_page(plan, explanation)
        return
    if stage is not None:
        yield stage_table(plan, explanation, stage)
    if memory or (stage is not None and not comm):
        yield memory_table(explanation, stage)
    if comm:
        yield communication_table(plan)
        yield from layout_parts(explanation)


def _print(
    parts: Iterator[RenderableType] | list[RenderableType],
    data: Explanation | WhyNot | Analysis | Timeline | None,
) -> None:
    if data is not None:
        print_json(asdict(data))
        return
    for part in parts:
        results().print(part)
