"""Times the steps of an emitted script on the ranks of a pool."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from autopar.codegen.proof.script_rank import imported
from benchmarks.script_step import mesh_of, step_of
from tests.runtime.processes import run_on_ranks

RANKS = 2
STEPS_TO_WARM_UP = 2
SECONDS_OF_A_VISIT = 0.8  # for the steps that are measured, after the warm-up
FEWEST_STEPS = 3


def step_seconds(script: Path) -> list[float]:
    """Return the seconds of several steps, each as measured on the slower rank."""
    by_rank = run_on_ranks(_steps, RANKS, str(script), timeout_seconds=120.0)
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def _steps(path: str) -> list[float]:
    script = imported(Path(path))
    step = step_of(script, mesh_of(script))

    def seconds_of_a_step() -> float:
        dist.barrier()
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    warm = [seconds_of_a_step() for _ in range(STEPS_TO_WARM_UP)]
    steps = [max(FEWEST_STEPS, round(SECONDS_OF_A_VISIT / warm[-1]))]
    dist.broadcast_object_list(steps)
    return [seconds_of_a_step() for _ in range(steps[0])]
