"""`autopar emit --for` writes jobs that schedulers run, whatever names and settings it is given."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.planner.cluster.file import read_cluster
from autopar.runtime.checkpointing.finding import checkpoints_in
from tests.autopar.commands import Autopar
from tests.autopar.mistakes import MODEL
from tests.codegen.launch.slurm import Slurm, slurm, why_no_slurm

CPUS = ("--device", "cpu", "--precision", "fp32", "--global-batch", "8")
GPUS = ("--device", "h100-sxm", "--global-batch", "32")
RESUMED = "goes on after step"


@pytest.fixture
def planned(autopar: Autopar) -> Callable[..., Path]:
    """Return what plans the small model, and gives the plan's folder."""

    def plan(*machines: str) -> Path:
        Path("model.py").write_text(MODEL, encoding="utf-8")
        ran = autopar("plan", "model.py", *machines, "-o", "out", "--force")
        assert ran.code == 0, ran.err
        return Path("out")

    return plan


def test_a_jobs_folder_has_all_that_its_training_needs(
    autopar: Autopar, planned: Callable[..., Path]
) -> None:
    planned("--gpus", "1", *CPUS)
    ran = autopar("emit", "out", "--for", "docker", "-o", "job")
    assert ran.code == 0, ran.err
    dockerfile = Path("job/Dockerfile").read_text(encoding="utf-8")
    for name in ("model.py", "train.py", "plan.json", "autopar", "requirements.txt"):
        assert Path("job", name).exists()
        assert f'"{name}"' in dockerfile
    lines = Path("job/requirements.txt").read_text(encoding="utf-8").split()
    assert [line.partition("==")[0] for line in lines] == ["safetensors", "torch"]
    assert autopar("emit", "out", "--for", "docker", "-o", "job").code == 0, "nothing has changed"
    Path("job/Dockerfile").write_text("FROM mine", encoding="utf-8")
    refused = autopar("emit", "out", "--for", "docker", "-o", "job")
    assert refused.code == 2
    assert "other contents is in the way" in refused.err
    assert Path("job/Dockerfile").read_text(encoding="utf-8") == "FROM mine"
    assert autopar("emit", "out", "--for", "docker", "-o", "job", "--force").code == 0


MISTAKES = (
    (("--for", "condor"), "slurm, kubernetes, docker, skypilot"),
    (("--for", "slurm", "--set", "partition=a;b"), "partition (the partition) is 'a;b'"),
    (("--set", "partition=a"), "need --for"),
    (("--print",), "need --for"),
    (("--for", "slurm", "--standalone"), "does not go with"),
    (("--", "--steps", "3"), "need --for"),
    (("--for", "slurm", "--print", "--", "--metrics", "a\nb"), "cannot be quoted for a shell"),
)


def test_jobs_are_printed_and_mistakes_told(autopar: Autopar, planned: Callable[..., Path]) -> None:
    planned("--gpus", "2", *GPUS)
    for target, name in (("slurm", "train.py --checkpoint checkpoints"), ("kubernetes", "JobSet")):
        ran = autopar("emit", "out", "--for", target, "--print", "--", "--steps", "7")
        assert ran.code == 0
        assert name in ran.out
        assert "7" in ran.out
        assert ("note: checkpoints stay in the containers" in ran.err) is (target != "slurm")
    for words, told in MISTAKES:
        ran = autopar("emit", "out", *words)
        assert ran.code == 2
        assert told in ran.err
    assert {one.name for one in Path("out").iterdir()} == {"plan.json", "train.py"}


_STAND_INS = {
    # Starts the one task of the job, without srun's own options.
    "srun": 'while [[ "$1" == --* ]]; do shift; done\nexec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >>requeued; fi',
}
MANY_STEPS, STEPS = "100000", "--steps"
JOB = ("--set", "cpus=2", "--set", f"python={sys.executable}", "--", "--checkpoint-every", "20")


def _emit_job(autopar: Autopar, steps: str) -> None:
    own = ("--export", "none", "--log-every", "10", STEPS, steps)
    ran = autopar("emit", "out", "--for", "slurm", "-o", "job", "--force", *JOB, *own)
    assert ran.code == 0, ran.err


def _wait_for_checkpoint(folder: Path, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not checkpoints_in(folder) and not is_over() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert checkpoints_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.more_cells)])
def test_a_job_is_stopped_by_sigusr1_put_back_and_resumed(
    autopar: Autopar, planned: Callable[..., Path], tmp_path: Path, resumes: bool
) -> None:
    planned("--gpus", "1", *CPUS)
    _emit_job(autopar, MANY_STEPS)
    for name, text in _STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "OMP_NUM_THREADS": "1"}
    variables = {**os.environ, **step, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def start() -> subprocess.Popen[str]:
        with (tmp_path / "log").open("a") as log:
            command = ["bash", "job.sbatch"]
            return subprocess.Popen(
                command, cwd="job", env=variables, stdout=log, stderr=log, text=True
            )

    job = start()
    _wait_for_checkpoint(tmp_path / "job/checkpoints", lambda: job.poll() is not None)
    (task,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR1)  # as Slurm does: to the tasks of the job's step
    assert job.wait(timeout=300) == 75, (tmp_path / "log").read_text()[-3000:]
    assert Path("job/requeued").read_text() == "requeue 7\n"
    if not resumes:
        return
    last = checkpoints_in(tmp_path / "job/checkpoints")[0].name.removeprefix("step-")
    _emit_job(autopar, str(int(last) + 30))
    assert start().wait(timeout=300) == 0, (tmp_path / "log").read_text()[-3000:]
    assert f"{RESUMED} {int(last):,}" in (tmp_path / "log").read_text()
    assert Path("job/requeued").read_text() == "requeue 7\n", "a finished job is not put back"


WHY_NOT = why_no_slurm()


def _await_state(one: Slurm, job: str, *states: str) -> str:
    deadline = time.monotonic() + 300
    while (state := one.state(job)) not in states and time.monotonic() < deadline:
        time.sleep(0.3)
    return state


@pytest.mark.slow
@pytest.mark.more_cells
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_slurm_trains_a_job_on_two_nodes_requeues_it_and_lets_it_resume(
    autopar: Autopar,
    planned: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned("--gpus", "2", "--nodes", "2", *CPUS)
    _emit_job(autopar, MANY_STEPS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with slurm(tmp_path / "slurm") as one:
        monkeypatch.setenv("SLURM_CONF", str(one.configuration))
        ran = autopar("cluster", "detect", "--from", "slurm")
        assert ran.code == 0, ran.err
        first, second = read_cluster(Path("cluster.toml")).nodes
        assert (first.device.name, first.devices) == ("h100-sxm", 8)
        assert (second.device.name, second.devices) == ("a100-80gb-sxm", 4)
        job = one.call("sbatch", "--parsable", "job.sbatch", folder=Path("job")).strip()
        folder = tmp_path / "job/checkpoints"
        _wait_for_checkpoint(folder, lambda: one.state(job) not in ("PENDING", "RUNNING"))
        one.call("scancel", "--signal=USR1", job)
        assert _await_state(one, job, "PENDING", "FAILED", "COMPLETED") == "PENDING"
        last = int(checkpoints_in(folder)[0].name.removeprefix("step-"))
        assert _await_state(one, job, "RUNNING") == "RUNNING"
        log = Path(f"job/job-{job}.log")
        deadline = time.monotonic() + 300
        while f"{RESUMED} {last:,}" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.3)
        assert f"{RESUMED} {last:,}" in log.read_text()
        told = json.loads(autopar("status", "--slurm", job, "--json").out)
        assert (told["state"], told["job"]["state"]) == ("running", "RUNNING")
        assert (told["restarts"], told["job"]["restarts"]) == (1, 1)
        assert told["checkpoint_step"] >= last
        one.call("scancel", job)
        assert _await_state(one, job, "CANCELLED") == "CANCELLED"
        time.sleep(5)
        assert one.state(job) == "CANCELLED", "a job that its user ends is not put back"
    shutil.rmtree(tmp_path / "slurm")
