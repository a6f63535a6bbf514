"""A script whose replicas take local steps trains as one process that plays all replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import TrainingComparison, compared
from autopar.codegen.proof.plain import task_of, train_alone
from autopar.codegen.proof.replicas import STEPS_COMPARED
from autopar.codegen.proof.script_rank import run_script
from autopar.codegen.proof.verification import axes_of
from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.precision import Outer
from tests.cells import cells
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import run_on_ranks

STEPS = 2 * STEPS_COMPARED
STILL = ("dropout=0.0",)


def difference(
    folder: Path, name: str, arguments: tuple[str, ...], **pins: Any
) -> TrainingComparison:
    plan = pinned_plan(name, arguments, sync_every=16, **pins)
    path = write_script(plan, folder)
    steps = STEPS * plan.arrangement.outer_parts
    task = task_of(plan, plan.model.spec, steps=steps)
    assert task.local is not None
    assert bool(task.local.delay) == (plan.arrangement.outer_parts > 1)
    task = replace(task, local=replace(task.local, counting_script=str(path)))
    (alone,) = run_on_ranks(train_alone, 1, task)
    given = ["--steps", str(steps), "--dtype", "float64", "--log-every", "1"]
    ranks = run_on_ranks(run_script, plan.arrangement.ranks, str(path), given)
    return compared(ranks, alone, axes_of(plan))


KINDS: dict[str, dict[str, Any]] = {
    "replicas of one rank": {"data": 2, "shard": 1},
    "averages": {"data": 2, "shard": 1, "outer": Outer.AVERAGE},
    "zero 1": {"data": 4, "shard": 2, "zero_levels": (Zero.OPTIMIZER,)},
    "zero 2": {"data": 4, "shard": 2, "zero_levels": (Zero.GRADIENTS,)},
    "zero 3": {"data": 4, "shard": 2, "zero_levels": (Zero.PARAMETERS,)},
    "tensor": {"data": 2, "shard": 1, "tensor": 2, "split": ("heads", "ffn")},
    "pipeline": {"data": 2, "shard": 1, "pipeline": 2, "microbatch": 2},
    "microbatches": {"data": 2, "shard": 1, "microbatch": 2},
    "parts": {"data": 2, "shard": 1, "outer_parts": 3},
    "parts and zero 1": {"data": 4, "shard": 2, "outer_parts": 2, "zero_levels": (Zero.OPTIMIZER,)},
    "parts and zero 3": {
        "data": 4,
        "shard": 2,
        "outer_parts": 2,
        "zero_levels": (Zero.PARAMETERS,),
    },
    "on the host": {"data": 2, "shard": 1, "offloads": (Offload.OUTER,)},
    "parts on the host": {
        "data": 4,
        "shard": 2,
        "outer_parts": 2,
        "zero_levels": (Zero.OPTIMIZER,),
        "offloads": (Offload.OUTER,),
    },
    "parts and pipeline": {"data": 2, "shard": 1, "outer_parts": 2, "pipeline": 2, "microbatch": 2},
    "parts and tensor": {
        "data": 2,
        "shard": 1,
        "outer_parts": 2,
        "tensor": 2,
        "split": ("heads", "ffn"),
    },
}


STAND = ("zero 3", "tensor", "parts on the host", "parts and pipeline")


@pytest.mark.parametrize("kind", cells(KINDS, STAND))
def test_scripts_with_local_steps_train_as_replicas_in_one_process(
    kind: str, tmp_path: Path
) -> None:
    assert difference(tmp_path, "gpt2.py", STILL, **KINDS[kind]).is_within(1e-9)


@pytest.mark.parametrize("parts", cells((1, 2), (2,)))
def test_statistics_of_norms_are_those_of_a_replica(parts: int, tmp_path: Path) -> None:
    found = difference(tmp_path, "resnet.py", (), data=4, shard=2, outer_parts=parts)
    assert found.is_within(1e-9)


def test_replicas_with_unlike_numbers_of_targets_are_weighted_by_them(tmp_path: Path) -> None:
    found = difference(tmp_path, "t5.py", STILL, data=2, shard=1)
    assert found.is_within(1e-9)
