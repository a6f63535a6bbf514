"""Trains by an emitted script on a pool of ranks, and by one process, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import Comparison, assembled, compared
from autopar.codegen.proof.reference import Trained, task_of, train_alone
from autopar.codegen.proof.script_rank import RankTrained, run_script
from autopar.planner.plan.plan import Plan
from tests.runtime.ranks import run_on_ranks


def compare(
    plan: Plan, *, steps: int = 5, data: str = "dataset", dtype: str = "float64"
) -> Comparison:
    """Train by the script of a plan, and in one process; return how far they are apart."""
    task = task_of(plan, plan.model.spec, steps=steps, uses_dataset=data == "dataset", dtype=dtype)
    (expected,) = run_on_ranks(train_alone, 1, task)
    return compared(trained_by_script(plan, steps=steps, data=data, dtype=dtype), expected)


def trained_by_script(plan: Plan, *, steps: int, data: str, dtype: str) -> Trained:
    """Emit the script of a plan, run it on so many ranks, and put what they hold together."""
    arguments = ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]
    arguments += ["--data", data] if plan.model.has_dataset else []
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        ranks = run_on_ranks(
            run_script, plan.arrangement.ranks, str(path), arguments, timeout_seconds=120.0
        )
    return together(ranks)


def together(ranks: Sequence[RankTrained]) -> Trained:
    """Return the training that the ranks did together."""
    return Trained(
        losses=ranks[0].losses,
        gradients=assembled(rank.gradients for rank in ranks),
        parameters=assembled(rank.parameters for rank in ranks),
    )
