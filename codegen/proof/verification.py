"""Runs a script on CPU processes by torchrun, and one process beside it, and compares."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

from autopar.codegen.proof.comparison import Comparison, RankTrained, compared
from autopar.codegen.proof.draw_audit import Axes
from autopar.codegen.proof.given_script import GivenScript
from autopar.codegen.proof.reference import task_of, train_alone
from autopar.codegen.proof.script_rank import rank_file
from autopar.codegen.subject import model_spec
from autopar.planner.cluster.units import bytes_text
from autopar.planner.errors import AutoparError, ExitCode, InputError
from autopar.planner.plan.plan import Plan

LAST_LINES = 15  # of what a failed script printed
_KILLED = re.compile(r"exitcode\s*: -9\b")  # of what torchrun says failed first
_REFUSED = re.compile(r"^error: (.*)\n  fix: (.*)$", re.MULTILINE)  # as runtime.refusal has it
_HUNG = re.compile(r"Timeout \(\d+:\d\d:\d\d")  # as faulthandler begins
_TRACEBACK = "Traceback (most recent call last)"
LEAST_PATIENCE, SLOWER = 90.0, 5.0  # seconds, and times what one process takes, for each rank
PROCESS_BYTES = 300 * 2**20  # of Python with torch, without any model
STATE_BYTES = 32  # of a parameter in float64: itself, its gradient, the two moments of AdamW


class ScriptFailedError(AutoparError):
    """A script that ended with an error."""

    exit_code = ExitCode.TRAINING_FAILED


def verify(plan: Plan, folder: Path, script: GivenScript, *, steps: int) -> Comparison:
    """Return how far a script is from one process, in float64: exactly, and in what it draws.

    A relative path of the model file is seen from here, or else from `folder`.
    """
    task = replace(
        task_of(plan, model_spec(plan, folder), steps=steps),
        seed=script.seed,
        clips=bool(script.clip_norm),
        usual=script.usual,
    )
    begun = time.monotonic()
    expected = train_alone(task)
    arranged = plan.arrangement
    patience = LEAST_PATIENCE + SLOWER * arranged.ranks * (time.monotonic() - begun)
    ranks = _trained_by_script(script, arranged.ranks, steps=steps, patience=patience)
    axes = Axes(
        pipeline=arranged.pipeline,
        data=arranged.data,
        tensor=arranged.tensor,
        microbatches=arranged.microbatches,
    )
    return compared(ranks, expected, axes)


def check_fits(plan: Plan, memory_bytes: int) -> None:
    """Refuse what this machine has no memory for: one process' training, or so many processes."""
    needed_bytes = STATE_BYTES * plan.model.parameters
    if needed_bytes > memory_bytes:
        raise InputError(
            f"one process would need {bytes_text(needed_bytes)} to train {plan.model.name} in "
            f"float64, and this machine has {bytes_text(memory_bytes)}",
            fix="verify a small model of the same file under the same degrees: "
            "autopar verify PLAN --arg layers=… (see its build_model)",
        )
    ranks = plan.arrangement.ranks
    if ranks * PROCESS_BYTES > memory_bytes:
        raise InputError(
            f"the script would run in {ranks:,} processes here, of {bytes_text(PROCESS_BYTES)} "
            f"each, and this machine has {bytes_text(memory_bytes)}",
            fix="plan for fewer data ranks (--pin dp=2), and verify that",
        )


def step_flops(plan: Plan) -> int:
    """Return about what a step computes: twice for every weight and token, and twice that back."""
    return 6 * plan.model.parameters * plan.model.tokens_per_row * plan.arrangement.global_batch


def _trained_by_script(
    script: GivenScript, ranks: int, *, steps: int, patience: float
) -> list[RankTrained]:
    with TemporaryDirectory(prefix="autopar-verify-") as name:
        place = Path(name)
        own = ["--steps", str(steps), "--dtype", "float64", "--log-every", "1"]
        limit = str(script.clip_norm or 0.0)
        _run(ranks, script.path, [str(place), f"{patience:.0f}", limit, *own])
        return [pickle.loads(rank_file(place, rank).read_bytes()) for rank in range(ranks)]


def _run(ranks: int, script: Path, arguments: Sequence[str]) -> None:
    """Run script_rank by torchrun, on CPUs."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    module = ["-m", "autopar.codegen.proof.script_rank", str(script)]
    command = [sys.executable, *torchrun, *module, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure_of(done.stderr, ranks, script)


def failure_of(printed: str, ranks: int, script: Path | None = None) -> ScriptFailedError:
    """Return what failed, by what torchrun and the ranks have printed."""
    if _KILLED.search(printed.partition("Root Cause")[2]):
        return ScriptFailedError(
            f"one of {ranks} processes was killed, as happens when memory runs out",
            fix="verify a smaller model of the same file (autopar verify PLAN --arg layers=…), or "
            "end what else takes memory",
        )
    if hung := _HUNG.search(printed):
        inside = re.compile(rf'File "{re.escape(str(script))}", line (\d+) in (\w+)')
        at = inside.search(printed, hung.end())
        return ScriptFailedError(
            f"the script stands still on {ranks} processes"
            + (f": one of them waits in {at[2]}, line {at[1]}" if at else ""),
            fix="look for a collective that only some of the ranks call, or for a stage that gives "
            "other tensors than the next one takes",
        )
    if refusal := _REFUSED.search(printed):
        return ScriptFailedError(f"the script refuses to run: {refusal[1]}", fix=refusal[2])
    told = "\n".join(first_traceback(printed.strip().splitlines())[-LAST_LINES:])
    return ScriptFailedError(f"the script failed on {ranks} processes:\n{told}")


def first_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the first traceback of the rank that printed one first, or all lines.

    Lines of other ranks may stand between its own; what it raised later is set off by an empty one.
    """
    at = next((i for i, line in enumerate(lines) if _TRACEBACK in line), None)
    if at is None:
        return lines
    rank = lines[at].partition(_TRACEBACK)[0]
    if not rank:  # before the ranks have met nothing tells their lines apart
        frames = list(takewhile(lambda line: line.startswith(" "), lines[at + 1 :]))
        return lines[at : at + len(frames) + 2]
    own = (line for line in lines[at:] if line.startswith(rank.strip()))
    return list(takewhile(lambda line: line.strip() != rank.strip(), own))
