"""Turns the analysis of a run into the page that `autopar explain --analyze` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from autopar.pages.tables import figure_text, plain_table
from autopar.planner.cluster.units import seconds_text
from autopar.planner.plan.plan import Plan
from autopar.runs.run_analysis import Analysis, Figure


def analysis_page(plan: Plan, found: Analysis) -> Iterator[RenderableType]:
    """Yield predicted and measured figures, and what to do about those that are far off."""
    yield _side_by_side("Predicted and measured", found.figures)
    if found.ranks:
        yield _side_by_side(f"Step {found.profiled_step:,}, which was profiled", found.ranks)
    spread = f"{seconds_text(found.fastest_seconds)} to {seconds_text(found.slowest_seconds)}"
    lines = "1 step line" if found.lines == 1 else f"{found.lines} step lines"
    yield Text(f"Medians of {lines}, of {spread} a step.")
    if found.keeping_seconds is not None:
        yield Text(f"For a checkpoint, steps waited {seconds_text(found.keeping_seconds)}.")
    if not found.is_on_planned_device:
        device = plan.machines.device
        yield Text(
            f"The run was not on {device}, which the plan is for: its times tell nothing of it."
        )
        return
    step = found.figures[0]
    if step.is_far_off:
        yield Text(_advice(step, plan, is_profiled=bool(found.ranks)))


def _side_by_side(title: str, figures: Sequence[Figure]) -> RenderableType:
    table = plain_table(title, "", "predicted", "measured", "off by", "")
    for one in figures:
        texts = (figure_text(value, one.unit) for value in (one.predicted, one.measured))
        flag = Text("more than a quarter", style="red") if one.is_far_off else ""
        table.add_row(one.name, *texts, f"{one.error:+.0%}", flag)
    return table


def _advice(step: Figure, plan: Plan, *, is_profiled: bool) -> str:
    terms = sorted(plan.prediction.terms, key=lambda term: -term.seconds)[:3]
    made = ", ".join(f"{one.name} {seconds_text(one.seconds)}" for one in terms if one.seconds)
    slower = "slower" if step.error > 0 else "faster"
    more = "" if is_profiled else "A run with --profile-step 20 tells which ranks wait. "
    return (
        f"Steps are {slower} than planned by more than a quarter. Planned were {made}. "
        f"{more}`autopar profile` measures ops and links on this machine, and `autopar plan "
        "--profile` plans by that. If the devices wait for rows, --workers reads ahead."
    )
