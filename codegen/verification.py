"""Runs a plan's script on CPU processes by torchrun, and one process beside it, and compares."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.codegen.comparison import Comparison, Held, assembled, compared
from autopar.codegen.emit import write_script
from autopar.codegen.reference import Trained, task_of, train_alone
from autopar.codegen.script_rank import rank_file
from autopar.codegen.subject import model_spec
from autopar.planner.errors import AutoparError, ExitCode
from autopar.planner.plan.plan import Plan

LAST_LINES = 15  # of what a failed script printed


class ScriptFailedError(AutoparError):
    """A script that ended with an error."""

    exit_code = ExitCode.TRAINING_FAILED


def verify(plan: Plan, folder: Path, *, steps: int) -> Comparison:
    """Return how far the script of a plan is from one process, in float64 and without dropout.

    A relative path of the model file is seen from here, or else from `folder`.
    """
    found = _trained_by_script(plan, folder, steps=steps)
    expected = train_alone(task_of(plan, model_spec(plan, folder), steps=steps))
    return compared(found, expected)


def _trained_by_script(plan: Plan, folder: Path, *, steps: int) -> Trained:
    with TemporaryDirectory(prefix="autopar-verify-") as name:
        place = Path(name)
        script = write_script(plan, place, model_folder=folder)
        arguments = ["--steps", str(steps), "--dtype", "float64", "--log-every", "1"]
        _run(plan.arrangement.ranks, [str(script), str(place), *arguments])
        ranks = [_left_by(place, rank) for rank in range(plan.arrangement.ranks)]
    losses, _, _ = ranks[0]
    return Trained(
        losses=losses,
        gradients=assembled(gradients for _, gradients, _ in ranks),
        parameters=assembled(parameters for _, _, parameters in ranks),
    )


def _left_by(place: Path, rank: int) -> tuple[tuple[float, ...], Held, Held]:
    left: tuple[tuple[float, ...], Held, Held] = pickle.loads(rank_file(place, rank).read_bytes())
    return left


def _run(ranks: int, arguments: list[str]) -> None:
    """Run script_rank by torchrun, on CPUs."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, "-m", "autopar.codegen.script_rank", *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raised = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        shown = lines[raised[0] :] if raised else lines
        raise ScriptFailedError(
            f"the script failed on {ranks} processes:\n" + "\n".join(shown[:LAST_LINES])
        )
