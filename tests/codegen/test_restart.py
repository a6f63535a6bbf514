"""Scripts that are stopped, killed and started again, on real torchrun jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autopar.codegen.emit import write_script
from autopar.runtime.keeping.finding import checkpoints_in, verify_checkpoint
from tests.codegen.kinds import plan_of
from tests.codegen.plans import pinned_plan
from tests.codegen.test_resume import run_script
from tests.runtime.processes import run_on_ranks

KILLED_ONCE = """        keeper.after(step)
        if step == 3 and mesh.rank == 1 and not Path("killed").exists():
            Path("killed").touch()
            __import__("os").kill(__import__("os").getpid(), 9)
"""
STOPPED = 75


def start_job(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(script: Path, *options: str) -> list[str]:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*run, *options, str(script)]


def wait_for_checkpoint(job: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not checkpoints_in(folder) and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert checkpoints_in(folder), job.communicate(timeout=30)[1][-3000:]


@pytest.mark.slow
def test_after_a_kill_of_a_rank_the_training_ends_as_if_undisturbed(tmp_path: Path) -> None:
    script = write_script(plan_of("zero1"), tmp_path)
    run_on_ranks(run_script, 2, str(script), ["--steps", "5", "--export", str(tmp_path / "a")])
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("        keeper.after(step)\n", KILLED_ONCE), encoding="utf-8")
    own = ["--steps", "5", "--resume", "auto", "--checkpoint-every", "2"]
    command = [*torchrun(script, "--max-restarts", "3"), *own, "--export", "b", "--lr", "0.01"]
    job = start_job(command, tmp_path)
    error = job.communicate(timeout=150)[1]
    assert job.returncode == 0, error[-3000:]
    assert (tmp_path / "killed").exists()
    assert "goes on after step 2" in error
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in "ba")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_torchrun_leaves_a_whole_checkpoint(
    sent: signal.Signals, tmp_path: Path
) -> None:
    script, kept = write_script(plan_of("pp"), tmp_path), tmp_path / "kept"
    own = ["--steps", "1000000", "--checkpoint", str(kept), "--checkpoint-every", "5"]
    job = start_job([*torchrun(script), *own], tmp_path)
    wait_for_checkpoint(job, kept)
    job.send_signal(sent)
    error = job.communicate(timeout=60)[1]  # which ends when no rank is left
    assert job.returncode != 0
    assert "stopped by a signal after step" in error
    newest = checkpoints_in(kept)[0]
    assert f"after step {verify_checkpoint(newest).moment.step:,};" in error
    assert not list(kept.glob("*.tmp"))


@pytest.mark.slow
def test_one_process_that_is_told_to_stop_leaves_with_75(tmp_path: Path) -> None:
    script = write_script(pinned_plan("mnist.py", (), microbatch=4), tmp_path)
    kept = tmp_path / "kept"
    own = ["--steps", "1000000", "--checkpoint", str(kept), "--checkpoint-every", "100"]
    job = start_job([str(script), "--data", "synthetic", *own], tmp_path)
    wait_for_checkpoint(job, kept)
    job.send_signal(signal.SIGUSR1)
    error = job.communicate(timeout=60)[1]
    assert job.returncode == STOPPED, error[-3000:]
    assert not (tmp_path / "model.safetensors").exists()
