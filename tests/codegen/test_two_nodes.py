"""Scripts train on two nodes, each with a torchrun and a network of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.reference import task_of, train_alone
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan
from tests.codegen.two_nodes import start_on, two_nodes, why_not
from tests.runtime.processes import run_on_ranks

WHY_NOT = why_not()
STEPS = 3


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("kind", ["zero1", "pp"])
def test_losses_of_two_nodes_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    plan = pinned_plan("llama.py", ("layers=4",), **KINDS[kind])  # it has no dropout
    script = write_script(plan, tmp_path)
    own = ["--steps", str(STEPS), "--log-every", "1", "--clip", "0", "--dtype", "float64"]
    own += ["--data", "synthetic", "--json", "--export", "none"]
    with two_nodes() as nodes:
        jobs = [start_on(node, number, script, *own) for number, node in enumerate(nodes)]
        printed, errors = zip(*(job.communicate(timeout=120) for job in jobs), strict=True)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(errors)
    losses = [json.loads(line)["loss"] for line in printed[0].splitlines() if line[:1] == "{"]
    task = task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=False)
    (alone,) = run_on_ranks(train_alone, 1, replace(task, clips=False))
    assert losses == pytest.approx(alone.losses, rel=1e-9)
    assert len(set(losses)) == STEPS
