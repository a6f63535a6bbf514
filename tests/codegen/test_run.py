"""Scripts run as people start them: torchrun, from any folder, with and without autopar around."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.dryrun.running import dry_run
from autopar.codegen.proof.exactness import failure_of, first_traceback
from autopar.planner.plan.plan import Plan
from tests.cells import cells
from tests.codegen.kinds import plan_of


def started(script: Path, processes: int, folder: Path, *arguments: str) -> list[float]:
    """Run a script by torchrun and return the losses that it logs."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), "--json", "--log-every", "1", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
@pytest.mark.parametrize("kind", cells(["ddp", "pp"], ["pp"]))
def test_a_script_trains_under_torchrun_from_any_folder(kind: str, tmp_path: Path) -> None:
    script = write_script(plan_of(kind), tmp_path / "out")
    losses = started(script, 2, tmp_path, "--steps", "8", "--data", "synthetic", "--lr", "0.01")
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow
@pytest.mark.parametrize("rank", cells((0, 1), (1,)))
def test_a_dry_run_sends_what_the_script_would(rank: int, tmp_path: Path) -> None:
    plan: Plan = plan_of("pp")
    found = dry_run(plan, tmp_path, rank=rank)
    kinds = {one["kind"]: one["count"] for one in found.collectives}
    assert kinds["send"] == kinds["recv"]
    assert found.peak_bytes == sum(found.peak_bytes_by_category.values())
    assert found.peak_bytes > 2**20


def test_of_what_failed_scripts_say_the_first_traceback_is_told_to_its_end() -> None:
    said = [
        "W1 a warning", "[rank1]: Traceback (most recent call last):", '[rank1]:   File "a.py"',
        "[rank0]: Traceback (most recent call last):", '[rank0]:   File "b.py"',
        "[rank1]: RuntimeError: no room", "[rank1]: for this", "[rank0]: OSError: closed",
        "[rank1]:", "[rank1]: During handling of the above another occurred:", "E1 ended",
    ]  # fmt: skip
    own = [
        "Traceback (most recent call last):",
        '  File "a.py"',
        "RuntimeError: no room",
        "for this",
    ]
    assert first_traceback(said) == [f"[rank1]: {line}" for line in own]
    assert first_traceback(["no traceback"]) == ["no traceback"]
    alone = ["Traceback (most recent call last):", '  File "a.py"', "    x = y", "NameError: y"]
    assert first_traceback([*alone, *alone, "E1 ended", "  rank: 1"]) == alone


def test_a_script_that_stands_still_is_told_with_the_line_where_it_waits() -> None:
    said = (
        "Timeout (0:01:30)!\nThread 0x1 (most recent call first):\n"
        '  File "/lib/torch/distributed.py", line 9 in wait\n'
        '  File "/out/train.py", line 12 in step\n'
    )
    error = failure_of(said, 2, Path("/out/train.py"))
    assert str(error).startswith(
        "the script stands still on 2 processes: one of them waits in step, line 12"
    )
    assert error.exit_code == 7


@pytest.mark.usefixtures("forked_python")
def test_a_process_that_was_killed_is_told_as_such(tmp_path: Path) -> None:
    killed = tmp_path / "killed.py"
    killed.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(killed)]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=False)
    error = failure_of(done.stderr, 2)
    assert "one of 2 processes was killed" in str(error)
    assert "smaller model" in error.fix
    assert "the script failed" in str(failure_of("Traceback (most recent call last):\nKeyError", 2))


@pytest.mark.usefixtures("forked_python")
def test_what_a_script_refuses_is_told_in_its_own_words(tmp_path: Path) -> None:
    script = tmp_path / "refuses.py"
    script.write_text(
        "from autopar.runtime.ranks.leaving import refuse\n"
        "refuse('no such rows', fix='give some')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True, check=False)
    error = failure_of(done.stderr, 2)
    assert str(error).startswith("the script refuses to run: no such rows")
    assert error.fix == "give some"
