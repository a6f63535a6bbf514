"""Runs scripts that evaluate on a pool of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.script_rank import imported
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.codegen.plans import plan_for
from tests.runtime.processes import run_on_ranks
from tests.strict.ranks import run_on_strict_ranks

STEPS = 5


def run_script(path: str, arguments: Sequence[str]) -> list[float]:
    """Run a script here, and return the losses that it logs."""
    script: Any = imported(Path(path))
    found: list[float] = script.main(["--log-every", "1", "--dtype", "float64", *arguments])[1]
    return found


def trained(plan: Plan, folder: Path, *arguments: str, steps: int = STEPS) -> list[float]:
    """Train by the script of a plan, which keeps its checkpoints and tells its metrics."""
    script = write_script(plan, folder, force=True)
    own = ["--steps", str(steps), *arguments]
    return run_on_strict_ranks(run_script, plan.arrangement.ranks, str(script), own)[0]


def small_plan(
    path: Path, *, pipeline: int = 1, data: int = 2, tensor: int = 1, **pins: Any
) -> Plan:
    """Return the plan of a small model; of a batch of 8 rows, a rank has 2 at a time."""
    file = load_model_file(str(path))
    own = {"microbatch": 2, **pins}
    return plan_for(file, trace(file), (), degrees=(pipeline, data, tensor), **own)


def keeping(folder: Path) -> tuple[str, ...]:
    """Return the options with which a script keeps its checkpoints, and tells its metrics."""
    return "--checkpoint", str(folder / "kept"), "--metrics", str(folder / "metrics.jsonl")


def events(folder: Path, event: str) -> list[Mapping[str, Any]]:
    """Return the events of one kind in the metrics of a script."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one for one in lines if one.get("event") == event]


def run_refused(path: str) -> str:
    """Run a script that leaves before it trains, and return what it says."""
    with (
        redirect_stderr(StringIO()) as said,
        redirect_stdout(StringIO()) as logged,
        pytest.raises(SystemExit, match="6"),
    ):
        run_script(path, ["--steps", "1", "--eval-every", "1"])
    assert "loss" not in logged.getvalue(), "no step is trained"
    return said.getvalue()


def refused(plan: Plan, folder: Path) -> str:
    """Return what the script of a plan says that leaves before it trains."""
    script = write_script(plan, folder, force=True)
    return run_on_ranks(run_refused, plan.arrangement.ranks, str(script))[0]
