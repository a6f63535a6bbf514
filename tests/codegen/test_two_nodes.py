"""Scripts train on two nodes, each with a torchrun and a network of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.exactness import all_steps
from autopar.codegen.proof.plain import task_of, train_alone
from autopar.planner.plan.files.document import write_plan
from autopar.runtime.checkpointing.finding import checkpoints_in, verify_checkpoint
from tests.cells import cells
from tests.codegen.kinds import KINDS, plan_of
from tests.codegen.plans import pinned_plan
from tests.codegen.two_nodes import PLACE, start_on, two_nodes, why_not
from tests.runtime.processes import run_on_ranks

pytestmark = pytest.mark.usefixtures("forked_python")
WHY_NOT = why_not()
STEPS = 3


def done_on_both(folder: Path, *words: str) -> list[str]:
    """Run a command on two nodes, and return what each of them prints."""
    with two_nodes() as nodes:
        jobs = start_on(nodes, folder, *words)
        printed, errors = zip(*(job.communicate(timeout=120) for job in jobs), strict=True)
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(errors)
    return list(printed)


def losses_of(text: str) -> list[float]:
    lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize("kind", cells(["zero1", "pp"], ["pp"]))  # below runs zero1
def test_losses_of_two_nodes_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    plan = pinned_plan("llama.py", ("layers=4",), **KINDS[kind])  # it has no dropout
    script = write_script(plan, tmp_path)
    own = ["--steps", str(all_steps(STEPS)), "--log-every", "1", "--data", "synthetic"]
    own += ["--clip", "0", "--dtype", "float64", "--export", "none"]
    torchrun = ("-m", "torch.distributed.run", *PLACE, "--nproc-per-node", "1", str(script))
    losses = losses_of(done_on_both(tmp_path, *torchrun, "--json", *own)[0])[:STEPS]
    task = task_of(plan, plan.model.spec, steps=STEPS, uses_dataset=False)
    (alone,) = run_on_ranks(train_alone, 1, replace(task, clip_norm=None))
    assert losses == pytest.approx(alone.losses, rel=1e-9)
    assert len(set(losses)) == STEPS


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_both_nodes_of_a_run_keep_it_in_one_folder(tmp_path: Path) -> None:
    plan = plan_of("zero1")
    write_script(plan, tmp_path)
    write_plan(plan, tmp_path / "plan.json")
    own = ("--steps", "4", "--log-every", "2", "--checkpoint-every", "2")
    printed = done_on_both(
        tmp_path, "-m", "autopar", "run", str(tmp_path), *PLACE, "--name", "shared", "--", *own
    )
    folder = tmp_path / "runs" / "shared"
    assert all(text.splitlines()[-1].startswith(f"finished: {folder}") for text in printed)
    assert len(losses_of((folder / "metrics.jsonl").read_text(encoding="utf-8"))) == 2
    kept = [verify_checkpoint(one).moment.step for one in checkpoints_in(folder / "checkpoints")]
    assert kept == [4, 2]
    assert (folder / "model.safetensors").is_file()
