"""Trains by an emitted script on a pool of ranks, and by one process, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import RankTrained, TrainingComparison, assembled, compared
from autopar.codegen.proof.plain import TrainedAlone, task_of
from autopar.codegen.proof.script_rank import run_script
from autopar.codegen.proof.verification import axes_of
from autopar.planner.plan.plan import Plan
from tests.codegen.normed_apart import parts_normed, train_normed_apart
from tests.runtime.processes import run_on_ranks


def compare(
    plan: Plan, *, steps: int = 5, data: str = "dataset", dtype: str = "float64"
) -> TrainingComparison:
    """Train by the script of a plan, and in one process; return how far they are apart."""
    task = task_of(plan, plan.model.spec, steps=steps, uses_dataset=data == "dataset", dtype=dtype)
    (expected,) = run_on_ranks(train_normed_apart, 1, task, parts_normed(plan))
    return compared(
        ranks_by_script(plan, steps=steps, data=data, dtype=dtype), expected, axes_of(plan)
    )


def ranks_by_script(plan: Plan, *, steps: int, data: str, dtype: str) -> list[RankTrained]:
    """Emit the script of a plan, run it on so many ranks, and return what each of them has."""
    arguments = ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]
    arguments += ["--data", data] if plan.model.has_dataset else []
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        return run_on_ranks(
            run_script, plan.arrangement.ranks, str(path), arguments, timeout_seconds=120.0
        )


def trained_by_script(plan: Plan, *, steps: int, data: str, dtype: str) -> TrainedAlone:
    """Return the training that the ranks of a plan's script do together."""
    return together(ranks_by_script(plan, steps=steps, data=data, dtype=dtype))


def together(ranks: Sequence[RankTrained]) -> TrainedAlone:
    """Return the training that the ranks did together."""
    return TrainedAlone(
        losses=ranks[0].losses,
        norms=ranks[0].norms,
        gradients=assembled(rank.gradients for rank in ranks),
        initial=assembled(rank.initial for rank in ranks),
        parameters=assembled(rank.parameters for rank in ranks),
    )
