"""A training that meets one fault after another ends with the weights of an undisturbed one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.costs.prediction import Zero
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.files.document import write_plan
from autopar.planner.trace import trace
from autopar.runtime.checkpointing.finding import checkpoints_in, unfinished_in
from autopar.runtime.ranks.locations import Location
from tests.autopar.test_run import wait_until_gone
from tests.bucket import bucket
from tests.cells import cells
from tests.codegen.plans import plan_for
from tests.codegen.test_restart import start_job, torchrun
from tests.codegen.test_resume import run_as_given
from tests.runtime.processes import run_on_ranks

pytestmark = pytest.mark.usefixtures("forked_python")
ROOT = Path(__file__).parents[2]
MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 128), nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 8))


def example_batch(batch_size):
    return {"input": torch.randn(batch_size, 8), "wanted": torch.rand(batch_size, 8)}


def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["wanted"])


def build_dataset():
    rows = torch.Generator().manual_seed(1)
    return [
        {"input": torch.randn(8, generator=rows), "wanted": torch.rand(8, generator=rows)}
        for _ in range(30)
    ]
"""
STEPS = ("--steps", "12")
# What is told of each fault, in the order of the starts.
TOLD = {
    "a rank dies": "exitcode: -9",
    "a write has begun": "goes on after step 2",
    "half a file": "goes on after step 2",
    "no manifest": "goes on after step 2",
    "no name yet": "goes on after step 2",
    "the disk is full": "step 4 could not be kept (File too large",
    "a byte is flipped": "rank-00001.safetensors has other contents than were written",
    "asked while it writes": "stopped by a signal after step",
    "asked in a step": "stopped by a signal after step 10",
}
FEW = ("a rank dies", "half a file", "asked while it writes")
IN_A_STORE = (*FEW[:2], "no manifest", "a byte is flipped")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(MODEL, encoding="utf-8")
    file = load_model_file(str(tmp_path / "small.py"))
    plan = plan_for(file, trace(file), (), degrees=(1, 2, 1), zero_levels=(Zero.OPTIMIZER,))
    write_plan(plan, tmp_path / "plan.json")
    return write_script(plan, tmp_path)


def let_faults_in(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    imported = "from autopar.runtime.checkpointing import Keeper\n"
    script.write_text(text.replace(imported, imported + "from tests.codegen import faults\n"))


def variables(*faults: str) -> dict[str, str]:
    return {"FAULTS": ",".join(faults), "PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "place"),
    cells(
        [(tuple(TOLD), Path), (FEW, Path), (IN_A_STORE, bucket)],
        [(FEW, Path)],  # test_stores.py reads what is left in a store
    ),
)
def test_faults_one_after_another_leave_no_trace(
    faults: Sequence[str], place: Callable[[Path], Location], script: Path, tmp_path: Path
) -> None:
    kept, export = place(tmp_path / "kept"), place(tmp_path / "b")
    run_on_ranks(run_as_given, 2, str(script), [*STEPS, "--export", str(tmp_path / "a")])
    let_faults_in(script)
    places = ["--checkpoint", str(kept), "--export", str(export)]
    own = ["--resume", "auto", "--checkpoint-every", "2", *places]
    command = [*torchrun(script, "--max-restarts", str(len(faults))), *STEPS, *own]
    job = start_job(command, tmp_path, **variables(*faults, "none"))
    error = job.communicate(timeout=240)[1]
    assert job.returncode == 0, error[-5000:]
    assert [TOLD[one] for one in faults if TOLD[one] not in error] == []
    assert error.count("exitcode: 75") >= sum(one.startswith("asked") for one in faults)
    expected = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert (export / "model.safetensors").read_bytes() == expected
    assert not unfinished_in(kept)
    assert {one.name for one in checkpoints_in(kept)} == {"step-12", "step-10", "step-8"}
    wait_until_gone(script, 5)


@pytest.mark.slow
def test_a_training_that_stands_still_is_ended_and_says_where(script: Path, tmp_path: Path) -> None:
    let_faults_in(script)
    own = ["--max-restarts", "1", "--", *STEPS, "--timeout", "3"]
    command = ["-m", "autopar", "run", str(tmp_path), *own]
    faults = variables("stopped", "asleep")
    job = start_job(command, tmp_path, subprocess.PIPE, **faults)
    error = "".join(job.communicate(timeout=240))
    assert job.returncode == 7, error[-5000:]
    told = error.replace("[0] ", "").replace("[1] ", "")
    still = "error: no step has ended for 3 s: "
    waits = "rank 0 after step 3, in main (train.py, line "
    assert f"{still}rank 1 does not answer, and may be stopped; {waits}" in told
    assert "; rank 1 after step 2, in main (train.py" in told
    assert "time.sleep(1000)" in error
    assert (
        f"the training failed before its first logged step: {still.removeprefix('error: ')}"
        in error
    )
    wait_until_gone(script, 5)
