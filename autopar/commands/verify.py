"""`autopar verify`: whether the script of a plan trains exactly as one process does."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from autopar.codegen.comparison import Comparison
from autopar.codegen.verification import check_fits, step_flops, verify
from autopar.commands.emit import PLAN
from autopar.console import progress, results, tell_note
from autopar.planner.errors import ExitCode
from autopar.planner.plan.document import read_plan
from autopar.tables import plain_table

TOLERANCE = 1e-9  # in float64, after several steps of AdamW
MANY_FLOPS = 2e12  # a step of more takes minutes


def verify_plan(
    plan: PLAN,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="To train.")] = 5,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, metavar="X", help="Largest difference to accept."),
    ] = TOLERANCE,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Train a few steps by the script on CPU processes and in one process, and compare.

    Both compute in float64, without dropout, on this machine: give it the plan of a small model.

    Example: autopar verify tiny/plan.json --steps 3
    """
    found = read_plan(plan)
    check_fits(found, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if step_flops(found) > MANY_FLOPS:
        tell_note(
            f"a step computes about {step_flops(found) / 1e12:,.0f} TFLOP, on CPUs and in float64: "
            "a plan of a smaller model (--arg) and batch (--global-batch) shows the same sooner"
        )
    folder = plan if plan.is_dir() else plan.parent
    with progress(f"training {steps} steps on {found.arrangement.ranks} processes and on one"):
        comparison = verify(found, folder, steps=steps)
    equal = comparison.is_within(tolerance)
    if as_json:
        print(json.dumps({**asdict(comparison), "tolerance": tolerance, "is_equal": equal}))
    else:
        _tell(comparison, tolerance)
    if not equal:
        raise typer.Exit(int(ExitCode.NEGATIVE))


def _tell(comparison: Comparison, tolerance: float) -> None:
    table = plain_table("", "what", "largest difference", "of", "", left=1)
    rows = (
        ("loss", comparison.loss),
        ("gradients of the first step", comparison.gradient),
        ("parameters after the last", comparison.parameter),
    )
    for what, difference in rows:
        verdict = "equal" if difference.largest <= tolerance else "DIFFERS"
        table.add_row(what, f"{difference.largest:.1e}", difference.name, verdict)
    results().print(table)
    losses = ", ".join(f"{loss:.6f}" for loss in comparison.losses)
    results().print(f"losses of one process: {losses}\ntolerance: {tolerance:g}", markup=False)
