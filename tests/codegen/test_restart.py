"""Scripts that are told to stop, on real torchrun jobs; those that are killed: test_faults.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.runtime.checkpointing.finding import checkpoints_in, verify_checkpoint
from tests.cells import cells
from tests.codegen.kinds import plan_of
from tests.codegen.plans import pinned_plan

pytestmark = pytest.mark.usefixtures("forked_python")
STOPPED = 75


def start_job(
    command: list[str], folder: Path, stdout: int = subprocess.DEVNULL, /, **variables: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables,
        stdout=stdout,
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
@pytest.mark.parametrize("sent", cells((signal.SIGTERM, signal.SIGKILL), [signal.SIGTERM]))
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
