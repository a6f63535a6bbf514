"""Runs one rank of a plan's script on the device of this machine, and measures its step.

The rank computes as in training, but its process group sends nothing: a received tensor holds
zeros, or what its memory held before. Matrices of weights are drawn on the device, because a CPU
takes minutes to draw large models. `python -m autopar.codegen.proof.dryrun.rehearsing SCRIPT`
measures the rank that AUTOPAR_DRYRUN="rank/world/device" names. If a step has many microbatches,
two shorter steps are measured instead, as in a dry run (see running.py).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.codegen.proof.dryrun.running import (
    microbatches_run,
    predicted_memory,
    report_of_process,
    started,
    written,
)
from autopar.codegen.proof.dryrun.watching import FirstStep, run_first_step
from autopar.planner.costs.prediction import MemoryPrediction
from autopar.planner.plan.plan import Plan, StoredPlan
from autopar.planner.plan.telling.timeline import (
    computing_seconds,
    slowed_step_seconds,
    stages_of_rank,
)
from autopar.runtime.ranks.mesh import DRY_RUN
from autopar.runtime.tensor.shards import TensorPlace
from autopar.runtime.weights.initial_weights import Recipe
from autopar.runtime.weights.stored_tensors import TensorSource

_WARM_STEPS = 2  # allocate the optimizer's states and receive buffers, choose kernels
_MODULE = "autopar.codegen.proof.dryrun.rehearsing"


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRank:
    """The measured step of a pipeline rank, and its prediction; bytes as torch reserves them."""

    pipeline_rank: int
    seconds: float
    predicted_seconds: float
    peak_bytes: int | None  # None on a CPU
    predicted_bytes: int

    @property
    def factor(self) -> float:
        """How many times as long as predicted the rank computes."""
        return self.seconds / self.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The measured ranks, and the step computed from them and from predicted messages."""

    device: str
    ranks: tuple[RehearsedRank, ...]
    predicted_step_seconds: float
    step_seconds: float


def rehearse(plan: Plan, folder: Path, *, pipeline_ranks: Sequence[int], steps: int) -> Rehearsal:
    """Measure some pipeline ranks, one after another; others get the factor of the nearest one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    counts = microbatches_run(plan.arrangement)
    with TemporaryDirectory(prefix="autopar-rehearsal-") as name:
        scripts = written(plan, folder, Path(name).resolve(), counts)
        ranks = tuple(
            _measured(plan, scripts, counts, rank, device, steps) for rank in pipeline_ranks
        )
    factors = [
        min(ranks, key=lambda one: abs(one.pipeline_rank - rank)).factor
        for rank in range(plan.arrangement.pipeline)
    ]
    return Rehearsal(
        device=device,
        ranks=ranks,
        predicted_step_seconds=plan.prediction.step_seconds,
        step_seconds=slowed_step_seconds(plan, factors),
    )


def distinct_ranks(plan: StoredPlan) -> list[int]:
    """Return the pipeline ranks to measure: of ranks with equal predictions, the first."""
    found: dict[tuple[tuple[float, float], ...], int] = {}
    for rank in range(plan.arrangement.pipeline):
        stages = stages_of_rank(plan, rank)
        found.setdefault(tuple((one.forward_seconds, one.backward_seconds) for one in stages), rank)
    return list(found.values())


def _measured(
    plan: Plan,
    scripts: Sequence[Path],
    counts: Sequence[int],
    pipeline_rank: int,
    device: str,
    steps: int,
) -> RehearsedRank:
    arranged = plan.arrangement
    rank = pipeline_rank * arranged.data * arranged.tensor
    is_set = "OMP_NUM_THREADS" in os.environ or arranged.ranks == 1
    threads = {} if is_set else {"OMP_NUM_THREADS": "1"}  # as torchrun does
    reports = []
    for script in scripts:
        place = f"{rank}/{arranged.ranks}/{device}"
        process = started(_MODULE, [str(script), str(steps)], place, threads)
        reports.append(report_of_process(process, rank))
    seconds = float(reports[-1]["seconds"])
    if len(reports) > 1:
        more = seconds - float(reports[0]["seconds"])
        turns = (arranged.microbatches - counts[-1]) / (counts[-1] - counts[0])
        seconds += max(0.0, more) * turns
    memory: MemoryPrediction = predicted_memory(plan, rank)
    return RehearsedRank(
        pipeline_rank=pipeline_rank,
        seconds=seconds,
        predicted_seconds=computing_seconds(plan, pipeline_rank),
        peak_bytes=reports[-1]["peak_bytes"],
        predicted_bytes=memory.reserved_bytes,
    )


def measured_step(path: Path, steps: int) -> dict[str, Any]:
    """Run a script's step several times; return its median seconds and the peak of memory."""
    seconds: list[float] = []
    is_cuda = os.environ[DRY_RUN].endswith("cuda")

    def measured(step: FirstStep, entered: None) -> None:
        del entered
        for _ in range(_WARM_STEPS + steps):
            begun = time.perf_counter()
            step.take()
            if is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)

    torch.set_flush_denormal(True)  # received tensors may hold denormal numbers, which are slow
    with _drawn_on(torch.device("cuda" if is_cuda else "cpu")):
        run_first_step(path, _zeros_received(), measured)
    peak = torch.cuda.max_memory_reserved() if is_cuda else None
    return {"seconds": median(seconds[_WARM_STEPS:]), "peak_bytes": peak}


@contextmanager
def _drawn_on(device: torch.device) -> Iterator[None]:
    """Draw parameters of two and more dims on the device, and not as the constructor does."""
    constructed = Recipe.whole_tensor

    def drawn(self: Recipe, place: TensorPlace) -> tuple[tuple[int, ...], TensorSource | None]:
        shape = self.shapes[place.name]
        if len(shape) < 2 or not isinstance(place.tensor, nn.Parameter):
            return constructed(self, place)
        return shape, _DrawnSource(shape, device)

    with patch.object(Recipe, "whole_tensor", drawn):
        yield


@dataclass(frozen=True, slots=True)
class _DrawnSource:
    """A tensor whose slices are drawn when they are read, with a variance of 1 ÷ inputs."""

    shape: tuple[int, ...]
    device: torch.device

    def __getitem__(self, index: Any) -> Tensor:
        shape = torch.empty(self.shape, device="meta")[index].shape
        drawn = torch.randn(shape, device=self.device)
        return drawn.div_(math.sqrt(math.prod(self.shape[1:])))


@contextmanager
def _zeros_received() -> Iterator[None]:
    """Fill buffers with zeros when something is received into them for the first time."""
    send_and_receive, seen = dist.batch_isend_irecv, set[int]()

    def filled(messages: list[dist.P2POp]) -> Any:
        for one in messages:
            if one.op is dist.irecv and one.tensor.data_ptr() not in seen:
                seen.add(one.tensor.data_ptr())
                one.tensor.detach().zero_()
        return send_and_receive(messages)

    with patch.object(dist, "batch_isend_irecv", filled):
        yield


if __name__ == "__main__":
    print(json.dumps(measured_step(Path(sys.argv[1]), int(sys.argv[2]))))
