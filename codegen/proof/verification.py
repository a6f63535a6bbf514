"""Runs a script on CPU processes by torchrun, and plain PyTorch in one process, and compares."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autopar.codegen.proof.comparison import Comparison, compared
from autopar.codegen.proof.device_draws import device_draw_faults
from autopar.codegen.proof.draw_audit import Axes
from autopar.codegen.proof.failure import failure_of
from autopar.codegen.proof.given_script import GivenScript
from autopar.codegen.proof.half_comparison import compared_in_half
from autopar.codegen.proof.plain import Task, task_of
from autopar.codegen.proof.plain_half import PlainHalf, train_in_half
from autopar.codegen.proof.reference import train_alone
from autopar.codegen.proof.script_rank import Job
from autopar.codegen.subject import model_spec
from autopar.planner.cluster.units import bytes_text
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import Plan

_RUNNING_AGAIN = ("recompute(", "checkpoint(")  # what a script calls for that
MANY_FLOPS = 10**12  # of all steps in 16 bits: minutes
LEAST_PATIENCE, SLOWER = 90.0, 5.0  # seconds, and times what one process takes, for each rank
PROCESS_BYTES = 300 * 2**20  # of Python with torch, without any model
# Of a parameter in float64: itself, its gradient, AdamW's two moments, and what is kept to compare:
# itself at the start and at the end, its gradient, and in fp32 the same of two trainings more.
STATE_BYTES = 72


def verify(
    plan: Plan, folder: Path, script: GivenScript, *, steps: int, half_steps: int = 0
) -> Comparison:
    """Return how far a script is from one process of plain PyTorch.

    Both compute in float64: exactly, and in what they draw. A plan in 16 bits is compared in these,
    too, for `half_steps`. Where layers run again, their draws are looked at on a pretended device.
    A relative path of the model file is seen from here, or else from `folder`.
    """
    task = replace(
        task_of(plan, model_spec(plan, folder), steps=steps),
        seed=script.seed,
        clip_norm=script.clip_norm,
        usual=script.usual,
    )
    half_steps = steps_in_half(plan, half_steps, steps)
    begun = time.monotonic()
    expected = train_alone(task)
    half, notes = _trained_in_half(plan, task, half_steps)
    ranks = plan.arrangement.ranks
    patience = LEAST_PATIENCE + SLOWER * ranks * (time.monotonic() - begun)
    kinds = {"exact": _words(steps, "float64")}
    if half is not None:
        kinds["half"] = _words(half_steps, half[0].dtype)
    found = _trained_by_script(script, ranks, kinds, patience=patience)
    comparison = compared(found["exact"], expected, axes_of(plan))
    if half is not None:
        comparison = replace(comparison, half=compared_in_half(found["half"], *half))
    faults, more = _draws_again(plan, script) if expected.draws else ((), ())
    return replace(comparison, faults=(*comparison.faults, *faults), notes=(*notes, *more))


def steps_in_half(plan: Plan, asked: int, steps: int) -> int:
    """Return how many steps are compared in 16 bits: fewer than asked for where they are long."""
    if not plan.arrangement.precision.is_half:
        return 0
    return min(asked, max(steps, MANY_FLOPS // step_flops(plan)))


def axes_of(plan: Plan) -> Axes:
    """Return the axes of a plan's ranks."""
    own = plan.arrangement
    return Axes(
        pipeline=own.pipeline, data=own.data, tensor=own.tensor, microbatches=own.microbatches
    )


def _words(steps: int, dtype: str) -> list[str]:
    return ["--steps", str(steps), "--dtype", dtype, "--log-every", "1"]


def _trained_in_half(
    plan: Plan, task: Task, steps: int
) -> tuple[tuple[PlainHalf, PlainHalf] | None, tuple[str, ...]]:
    """Train in the plan's own 16 bits by plain PyTorch, if this CPU can; else tell why not."""
    if not steps:
        return None, ()
    precision = plan.arrangement.precision
    try:
        return train_in_half(replace(task, steps=steps, dtype=precision.torch_name)), ()
    except (RuntimeError, NotImplementedError) as error:
        why = str(error).partition("\n")[0]
        return None, (f"nothing is compared in {precision}: plain PyTorch on a CPU says {why}",)


def _draws_again(plan: Plan, script: GivenScript) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what layers that run again draw otherwise on a device, or why that is not known."""
    text = script.path.read_text(encoding="utf-8")
    if not any(word in text for word in _RUNNING_AGAIN):
        return (), ()
    arranged = plan.arrangement
    first_of_stages = range(0, arranged.ranks, arranged.ranks // arranged.pipeline)
    try:
        return device_draw_faults(script.path, first_of_stages, arranged.ranks), ()
    except RuntimeError as error:
        why = str(error).strip().splitlines()[-2:]
        told = f"what layers draw where they run again is not compared: {' '.join(why)}"
        return (), (told,)


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
    script: GivenScript, ranks: int, kinds: Mapping[str, Sequence[str]], *, patience: float
) -> dict[str, list[Any]]:
    """Return what each rank has of each kind of training."""
    with TemporaryDirectory(prefix="autopar-verify-") as name:
        job = Job(
            folder=Path(name),
            patience_seconds=patience,
            clip_norm=script.clip_norm,
            exact=kinds["exact"],
            in_half=kinds.get("half", ()),
        )
        _run(ranks, script.path, job)
        return {
            kind: [pickle.loads(job.left(kind, rank).read_bytes()) for rank in range(ranks)]
            for kind in kinds
        }


def _run(ranks: int, script: Path, job: Job) -> None:
    """Run script_rank by torchrun, on CPUs."""
    job_file = job.folder / "job.pickle"
    job_file.write_bytes(pickle.dumps(job))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    module = ["-m", "autopar.codegen.proof.script_rank", str(script), str(job_file)]
    command = [sys.executable, *torchrun, *module]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise failure_of(done.stderr, ranks, script)
