"""`autopar diff`: what moved between two plans, and what that does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autopar.console import print_json, results
from autopar.pages.comparison_page import comparison_page
from autopar.planner.plan.files.document import read_plan
from autopar.planner.plan.parts import parts_of
from autopar.planner.plan.telling.comparison import compare


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="plan.json or its folder")],
    after: Annotated[Path, typer.Argument(metavar="B", help="plan.json or its folder")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say what moved from plan A to plan B, and what it does to time, communication, memory.

    Example: autopar diff before/plan.json after/plan.json
    """
    one, other = read_plan(before), read_plan(after)
    parts = parts_of(one, where=str(before))
    same = one.graph == other.graph and one.layouts == other.layouts and one.stages == other.stages
    other_parts = parts if same else parts_of(other, where=str(after))
    comparison = compare(one, other, parts=parts, other_parts=other_parts)
    if as_json:
        print_json(asdict(comparison))
        return
    for part in comparison_page(comparison, (str(before), str(after))):
        results().print(part)
