"""Turns a comparison of two plans into the page that `autopar diff` prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.pages.tables import figure_text, plain_table
from autopar.planner.plan.telling.comparison import Change, Comparison, Figure


def comparison_page(comparison: Comparison, names: tuple[str, str]) -> Iterator[RenderableType]:
    """Yield the page from top to bottom; `names` are what the two plans are called."""
    for warning in comparison.warnings:
        yield Text.assemble(("warning: ", "bold yellow"), warning)
    if comparison.changes:
        yield _changes("What moved", comparison.changes, names)
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


def _figures(figures: tuple[Figure, ...], names: tuple[str, str]) -> Table:
    table = plain_table("What it does", "", *names, "change")
    for one in figures:
        if one.before or one.after:
            texts = (figure_text(one.before, one.unit), figure_text(one.after, one.unit))
            table.add_row(one.name, *texts, _change(one))
    return table


def _change(one: Figure) -> str:
    if not one.before or one.before == one.after:
        return "" if one.before == one.after else "new"
    return f"{one.after / one.before - 1:+.1%}"
