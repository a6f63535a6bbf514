"""Runs one rank of a plan's script without computing: what memory it needs, what it sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autopar.codegen.emit import write_script
from autopar.codegen.verification import LAST_LINES, ScriptFailedError
from autopar.planner.errors import InputError
from autopar.planner.plan.plan import Plan
from autopar.runtime.mesh import DRY_RUN


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What one rank of the script needs; the last field is what the plan predicted of it."""

    rank: int
    peak_bytes: int
    peak_bytes_by_category: Mapping[str, int]
    collectives: tuple[Mapping[str, Any], ...]  # kind, ranks, bytes, count
    predicted_bytes: int

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_bytes / self.peak_bytes - 1


def dry_run(plan: Plan, folder: Path, *, rank: int) -> DryRun:
    """Return what a rank needs for the second step, when the optimizer's states are there."""
    ranks = plan.arrangement.ranks
    if not 0 <= rank < ranks:
        raise InputError(f"there is no rank {rank}", expected=f"0 to {ranks - 1}")
    with TemporaryDirectory(prefix="autopar-dryrun-") as name:
        script = write_script(plan, Path(name), model_folder=folder)
        environment = os.environ | {DRY_RUN: f"{rank}/{ranks}", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-LAST_LINES:]
        raise ScriptFailedError(f"the script of rank {rank} failed:\n" + "\n".join(lines))
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return DryRun(
        rank=rank,
        peak_bytes=report["peak_bytes"],
        peak_bytes_by_category=report["peak_bytes_by_category"],
        collectives=tuple(report["collectives"]),
        predicted_bytes=_predicted(plan, rank),
    )


def _predicted(plan: Plan, rank: int) -> int:
    """Return what the plan has for the rank's place in the pipeline."""
    arranged = plan.arrangement
    place = rank // (arranged.data * arranged.tensor)
    numbers = [i for i, stage in enumerate(plan.stages) if stage.rank == place]
    return plan.prediction.stages[numbers[0]].memory.allocated_bytes
