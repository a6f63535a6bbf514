"""Runs one rank of a plan's script without computing, to find its memory and its messages.

The microbatches of a step are alike. Once as many as possible are in flight, a further one needs no
more memory, and sends the same messages as the one before. Therefore only two steps with few
microbatches are run. Their difference gives the messages of each further microbatch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from autopar.codegen.emit import script_text
from autopar.codegen.proof.dryrun.watching import PICKED
from autopar.codegen.proof.exactness import LAST_LINES, ScriptFailedError
from autopar.codegen.subject import subject_of
from autopar.planner.costs.prediction import Arrangement, Compile, MemoryPrediction
from autopar.planner.costs.schedules.table import SCHEDULES, in_flight
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.errors import InputError
from autopar.planner.files import write_whole
from autopar.planner.plan.plan import Plan
from autopar.runtime.ranks.mesh import DRY_RUN

_MODULE = "autopar.codegen.proof.dryrun.watching"
Collectives: TypeAlias = tuple[Mapping[str, Any], ...]  # kind, ranks, bytes, count


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The memory and messages of a script's rank, and the plan's prediction of the memory.

    `host_bytes` are tensors in the host's memory.

    `predicted_bytes` counts tensors, like the peak. `predicted_device_bytes`, shown on the plan's
    page, includes the allocator's fragments and the device's context. A dry run executes compiled
    layers op by op (`runs_uncompiled`), so they hold more than predicted.
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
        running = [started(_MODULE, [str(script)], place, hidden) for script in scripts]
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
        runs_uncompiled=plan.arrangement.compile is not Compile.NONE,
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
