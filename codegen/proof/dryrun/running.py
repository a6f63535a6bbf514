"""Runs one rank of a plan's script: without computing (a dry run), or on this machine's device.

A dry run finds the rank's memory and its messages. The microbatches of a step are alike. Once as
many as possible are in flight, a further one needs no more memory, and sends the same messages as
the one before. Therefore only two steps with few microbatches are run. Their difference gives the
messages of each further microbatch.

A rehearsal measures the rank's step. The rank computes as in training, but its process group sends
nothing: a received tensor holds zeros, or what its memory held before. Matrices of weights are
drawn on the device, because a CPU takes minutes to draw large models. As in a dry run, two steps
with few microbatches are run, and the time of one with many is computed from theirs. `python -m
autopar.codegen.proof.dryrun.running SCRIPT STEPS` measures the rank that
AUTOPAR_DRYRUN="rank/world/device" names.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.codegen.emit import script_text
from autopar.codegen.proof.dryrun.watching import PICKED, FirstStep, run_first_step
from autopar.codegen.proof.exactness import LAST_LINES, ScriptFailedError
from autopar.codegen.subject import subject_of
from autopar.planner.costs.prediction import Arrangement, MemoryPrediction
from autopar.planner.costs.schedules.table import SCHEDULES, in_flight
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.errors import InputError
from autopar.planner.files import write_whole
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

_WATCHING = "autopar.codegen.proof.dryrun.watching"
Collectives: TypeAlias = tuple[Mapping[str, Any], ...]  # kind, ranks, bytes, count


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The memory and messages of a script's rank, and the plan's prediction of the memory.

    `peak_bytes`, `host_bytes` and `predicted_bytes` count tensors only. `predicted_device_bytes`,
    shown on the plan's page, also has the allocator's fragments and the device's context. A dry run
    executes compiled layers op by op (`runs_uncompiled`), so they hold more than predicted.
    """

    rank: int
    peak_bytes: int
    peak_bytes_by_category: Mapping[str, int]
    collectives: Collectives
    predicted_bytes: int
    predicted_device_bytes: int
    runs_uncompiled: bool
    host_bytes: int
    predicted_host_bytes: int

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_bytes / self.peak_bytes - 1


def dry_run(plan: Plan, folder: Path, *, rank: int) -> DryRun:
    """Return a rank's memory and messages in a step with existing optimizer states."""
    ranks = plan.arrangement.ranks
    if not 0 <= rank < ranks:
        raise InputError(f"there is no rank {rank}", expected=f"0 to {ranks - 1}")
    counts = microbatches_run(plan.arrangement)
    with TemporaryDirectory(prefix="autopar-dryrun-") as name:
        scripts = written(plan, folder, Path(name).resolve(), counts)
        hidden = {PICKED: json.dumps(_picked(plan)), "CUDA_VISIBLE_DEVICES": ""}
        place = f"{rank}/{ranks}"
        running = [started(_WATCHING, [str(script)], place, hidden) for script in scripts]
        reports = [report_of_process(process, rank) for process in running]
    report, predicted = reports[-1], predicted_memory(plan, rank)
    return DryRun(
        rank=rank,
        peak_bytes=report["peak_bytes"],
        peak_bytes_by_category=report["peak_bytes_by_category"],
        collectives=extrapolated(
            [tuple(one["collectives"]) for one in reports], counts, plan.arrangement.microbatches
        ),
        predicted_bytes=predicted.allocated_bytes,
        predicted_device_bytes=predicted.device_bytes,
        host_bytes=report["host_bytes"],
        predicted_host_bytes=predicted.host_bytes,
        runs_uncompiled=plan.arrangement.compile.takes_layers,
    )


def microbatches_run(arrangement: Arrangement) -> tuple[int, ...]:
    """Return the numbers of microbatches of the steps to run: all, or two small numbers.

    The smaller number fills the pipeline; the other has one round more. A round is one microbatch
    or, with several stages per rank, one for each rank.
    """
    is_one_by_one = SCHEDULES[arrangement.schedule].stages_per_rank == 1
    turn = 1 if is_one_by_one else arrangement.pipeline
    every = arrangement.microbatches
    fewer = arrangement.pipeline
    held = _in_flight(arrangement, every)
    while fewer < every and (fewer < max(held) or _in_flight(arrangement, fewer) != held):
        fewer += turn
    return (fewer, fewer + turn) if fewer + turn < every else (every,)


def _in_flight(arrangement: Arrangement, microbatches: int) -> tuple[int, ...]:
    shape = replace(pipeline_shape(arrangement), microbatches=microbatches)
    return in_flight(arrangement.schedule, shape)


def extrapolated(
    runs: Sequence[Collectives], counts: Sequence[int], microbatches: int
) -> Collectives:
    """Return the collectives of a step with `microbatches`, given those of the steps run."""
    last = runs[-1]
    if counts[-1] == microbatches:
        return last
    before = {_key(one): one["count"] for one in runs[0]}
    more, turn = microbatches - counts[-1], counts[-1] - counts[0]
    return tuple(
        {**one, "count": one["count"] + (one["count"] - before.get(_key(one), 0)) * more // turn}
        for one in last
    )


def _key(collective: Mapping[str, Any]) -> tuple[Any, ...]:
    return collective["kind"], collective["ranks"], collective["bytes"]


def written(plan: Plan, folder: Path, place: Path, counts: Sequence[int]) -> list[Path]:
    """Write the plan's script for each number of microbatches."""
    subject, scripts = subject_of(plan, folder), []
    for count in counts:
        scripts.append(place / f"train_{count}.py")
        short = replace(plan, arrangement=replace(plan.arrangement, microbatches=count))
        write_whole(scripts[-1], script_text(short, subject, scripts[-1]), what="the script")
    return scripts


def _picked(plan: Plan) -> list[tuple[int, float]]:
    """Return the sizes of a microbatch's masks, with the expected shares of true entries."""
    tensors, rows = plan.graph.tensors, plan.arrangement.microbatch
    shares: dict[int, float] = {}
    for one in tensors.values():
        if one.counted_by in tensors:
            entries = tensors[one.counted_by].numel.at(rows)
            shares[entries] = max(shares.get(entries, 0.0), one.expected)
    return list(shares.items())


def started(
    module: str, arguments: Sequence[str], place: str, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a module of this package as a rank of a fake world."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {DRY_RUN: place} | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of_process(process: subprocess.Popen[str], rank: int) -> dict[str, Any]:
    """Wait for the process of a rank, and return its report."""
    printed, said = process.communicate()
    if process.returncode:
        lines = said.strip().splitlines()[-LAST_LINES:]
        raise ScriptFailedError(f"the script of rank {rank} failed:\n" + "\n".join(lines))
    report: dict[str, Any] = json.loads(printed[printed.index("{") :])
    return report


def predicted_memory(plan: Plan, rank: int) -> MemoryPrediction:
    """Return the prediction for the rank's position in the pipeline."""
    arranged = plan.arrangement
    place = rank // (arranged.data * arranged.tensor)
    numbers = [i for i, stage in enumerate(plan.stages) if stage.rank == place]
    return plan.prediction.stages[numbers[0]].memory


_WARM_STEPS = 2  # allocate the optimizer's states and receive buffers, choose kernels
_REHEARSING = "autopar.codegen.proof.dryrun.running"


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
        """The measured over the predicted time."""
        return self.seconds / self.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The measured ranks, and the step computed from them and from predicted messages."""

    device: str
    ranks: tuple[RehearsedRank, ...]
    predicted_step_seconds: float
    step_seconds: float


def rehearse(plan: Plan, folder: Path, *, pipeline_ranks: Sequence[int], steps: int) -> Rehearsal:
    """Measure some pipeline ranks, one after another; others get the nearest rank's factor."""
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
    """Return the pipeline ranks to measure: the first of all ranks with the same prediction."""
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
        process = started(_REHEARSING, [str(script), str(steps)], place, threads)
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
