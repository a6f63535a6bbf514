"""`autopar status` tells how far a training is, from its files and from its scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.errors import InputError
from autopar.planner.plan.files.document import write_plan
from autopar.runs.run_status import jobset_in, run_folder, run_status, slurm_job, slurm_job_in
from tests.autopar.commands import Autopar
from tests.codegen.plans import pinned_plan
from tests.planner.plan.plans import without_graph

NOW = 1_000_000.0
# As Slurm 22.05 prints a job that runs, shortened.
SCONTROL = (
    "JobId=17 JobName=my model UserId=me(1000) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    "RunTime=1-00:10:00 TimeLimit=2-00:00:00 NodeList=gpu[01-02] ReqB:S:C:T=0:0:*:* "
    "Command=/home/me/job/job.sbatch WorkDir={folder} StdErr=/home/me/job/job-17.log Power="
)


def started(step: int = 0) -> dict[str, Any]:
    return {"event": "started", "step": step, "steps": 100}


def steps(first: int, last: int, seconds: float) -> list[dict[str, Any]]:
    """Return step lines; the first is slower, as after each start."""
    numbers = range(first, last + 1)
    return [
        {"step": n, "loss": 1.0 / n, "seconds": seconds * (10 if n == first else 1)}
        for n in numbers
    ]


def slow(step: int, rank: int) -> dict[str, Any]:
    seconds = {"own_seconds": 0.2, "others_seconds": 0.1}
    return {"event": "slow", "step": step, "rank": rank, "pipeline_rank": 0, "what": "x", **seconds}


def run_of(folder: Path, *parts: dict[str, Any] | Sequence[dict[str, Any]]) -> Path:
    """Write the metrics of a run."""
    lines = [line for part in parts for line in ([part] if isinstance(part, dict) else part)]
    text = "".join(json.dumps({"time": NOW, **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_status_counts_starts_and_takes_the_pace_since_the_last_one(tmp_path: Path) -> None:
    lines = (started(), steps(1, 20, 9.0), slow(20, 3), started(20), steps(21, 40, 0.5))
    found = run_status(run_of(tmp_path, *lines))
    assert (found.step, found.steps, found.restarts) == (40, 100, 1)
    assert found.loss == 1 / 40
    assert found.step_seconds == 0.5, "the first line of a start is no measure"
    assert found.seconds_left == 30.0
    assert found.slow_rank is None, "that was before the last start"
    assert found.silent_seconds == pytest.approx(time.time() - NOW, abs=60)
    assert found.state == "running"
    assert not found.is_over


def test_a_status_names_the_slow_rank_and_compares_with_the_plan(tmp_path: Path) -> None:
    plan = without_graph(pinned_plan("mnist.py", data=2, microbatch=4))
    write_plan(plan, tmp_path / "plan.json")
    seconds = plan.prediction.step_seconds * 2
    found = run_status(run_of(tmp_path, started(), steps(1, 9, seconds), slow(9, 3), slow(9, 5)))
    assert found.against_plan == pytest.approx(2.0)
    assert found.slow_rank is not None
    assert (found.slow_rank.rank, found.slow_rank.step) == (5, 9)


@pytest.mark.parametrize(
    ("event", "state", "is_over"),
    [("finished", "finished", True), ("preempted", "preempted", True), ("stopped", "failed", True)],
)
def test_the_last_event_is_the_state(event: str, state: str, is_over: bool, tmp_path: Path) -> None:
    found = run_status(run_of(tmp_path, started(), steps(1, 3, 1.0), {"event": event, "step": 3}))
    assert (found.state, found.is_over) == (state, is_over)
    again = run_status(run_of(tmp_path, {"event": event, "step": 3}, started(3), steps(4, 5, 1.0)))
    assert again.state == "running", "it has begun again"


def test_a_training_that_was_killed_is_told_by_its_claim(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert run_status(run_of(tmp_path, started(), steps(1, 3, 1.0))).state == "killed"


def test_a_preempted_run_whose_job_waits_is_not_over(tmp_path: Path) -> None:
    folder = run_of(tmp_path, started(), {"event": "preempted", "step": 3})
    waiting = slurm_job_in(SCONTROL.replace("RUNNING", "PENDING"))
    assert not run_status(folder, waiting).is_over


def test_a_job_of_slurm_is_read_field_by_field() -> None:
    job = slurm_job_in(SCONTROL.format(folder="/home/me/a job"))
    assert (job.name, job.state, job.reason) == ("my model", "RUNNING", "")
    assert (job.restarts, job.nodes, job.folder) == (2, "gpu[01-02]", "/home/me/a job")
    assert job.seconds_left == 23 * 3600 + 50 * 60
    unlimited = slurm_job_in(SCONTROL.replace("2-00:00:00", "UNLIMITED"))
    assert unlimited.seconds_left is None


@pytest.mark.parametrize("job", ["", "a", "1;ls", "-1", "$(id)", "1 2", "²"])
def test_only_numbers_are_jobs(job: str) -> None:
    with pytest.raises(InputError, match="--slurm"):
        slurm_job(job)


@pytest.mark.parametrize(
    ("condition", "phases", "state"),
    [
        (None, ("Running", "Running"), "RUNNING"),
        (None, ("Running", "Pending"), "PENDING"),
        (None, ("Running", "Succeeded"), "RUNNING"),
        (None, ("Running", "Failed"), "RUNNING"),
        (None, (), "PENDING"),
        ("Completed", ("Succeeded",), "COMPLETED"),
        ("Failed", ("Failed",), "FAILED"),
        ("Suspended", (), "PENDING"),
    ],
)
def test_a_jobset_is_read_from_json(
    condition: str | None, phases: tuple[str, ...], state: str
) -> None:
    conditions = [{"type": condition, "status": "True", "reason": "why"}] if condition else []
    status = {"conditions": [*conditions, {"type": "Other", "status": "False"}], "restarts": 4}
    pods = {"items": [{"status": {"phase": phase}} for phase in phases]}
    jobset = {"metadata": {"name": "j"}, "status": status}
    job = jobset_in(json.dumps(jobset), json.dumps(pods))
    assert (job.name, job.state, job.restarts) == ("j", state, 4)
    with pytest.raises(InputError, match="kubectl's answer"):
        jobset_in("[]", json.dumps(pods))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run in"):
        run_folder(tmp_path)


def stand_in(folder: Path, name: str, text: str) -> None:
    """Put a program of this name into a folder of programs, which prints a text."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "told").write_text(text, encoding="utf-8")
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\ncat {folder}/told\n", encoding="utf-8")
    program.chmod(0o755)


def test_the_command_finds_the_jobs_folder_and_tells_both(
    autopar: Autopar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, started(), steps(1, 50, 0.5), {"event": "finished", "step": 50})
    stand_in(tmp_path, "scontrol", SCONTROL.format(folder=tmp_path).replace("RUNNING", "COMPLETED"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    ran = autopar("status", "--slurm", "17", "--watch", "--json")
    told = json.loads(ran.out)
    assert (told["state"], told["step"], told["job"]["state"]) == ("finished", 50, "COMPLETED")
    ran = autopar("status", "--slurm", "17")
    for text in ("50 of 100 (50%)", "my model: COMPLETED", "500 ms", "2 by the scheduler"):
        assert text in ran.out
    assert ran.err == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "name a run, or its job"),
        (("--slurm", "1", "--kubernetes", "x"), "do not go together"),
        (("--slurm", "17"), "there is no command scontrol"),
        (("--kubernetes", "a b"), "--kubernetes a b"),
        (("nowhere",), "there is no run in"),
    ],
)
def test_a_status_that_nothing_can_tell_is_refused(
    autopar: Autopar, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = autopar("status", *words)
    assert ran.code == 2
    assert told in ran.err
