"""Every tensor of a script is on the device of its process, as far as that shows without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.costs.prediction import Offload, Recompute, Zero
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from tests.cells import cells
from tests.codegen import pretended_gpu
from tests.codegen.kinds import KINDS
from tests.codegen.plans import pinned_plan

pytestmark = pytest.mark.usefixtures("forked_python")
Job = tuple[Path, int, int]  # a script, the rank and how many there are

# torch's own checkpoint, too, aborts the process on a device that is written in Python.
NOTHING_RUNS_AGAIN = (RecomputePin(modules="*", mode=Recompute.NONE),)
VARIED = ("all",)  # whose ranks shard parameters as those of zero3 do
MORE = ("zero1", "zero3", "vocab", "zero_bubble_v")


def dry_runs(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Return the reports of ranks on a pretended device; raise with what a failing one said."""
    words = [word for path, rank, ranks in jobs for word in (str(path), f"{rank}/{ranks}")]
    done = subprocess.run(
        [sys.executable, "-m", pretended_gpu.__name__, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    decoder, text, reports = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        report, end = decoder.raw_decode(text)
        reports.append(report)
        text = text[end:].strip()
    return reports


def ranks_of(plan: Plan, folder: Path) -> list[Job]:
    """Return the first and the last rank of a plan's script."""
    ranks = plan.arrangement.ranks
    script = write_script(plan, folder)
    return [(script, rank, ranks) for rank in (0, ranks - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", cells([(VARIED,), (MORE,)], [(VARIED,)]))
def test_no_script_leaves_a_tensor_behind(kinds: Sequence[str], tmp_path: Path) -> None:
    pins = {"precision": Precision.FP16, "recompute": NOTHING_RUNS_AGAIN}
    plans = {kind: pinned_plan("gpt2.py", ("layers=4",), **KINDS[kind], **pins) for kind in kinds}
    plans["norms"] = pinned_plan("resnet.py", ("size=tiny",), **KINDS["ddp"], **pins)
    jobs = [job for name, plan in plans.items() for job in ranks_of(plan, tmp_path / name)]
    assert len(dry_runs(jobs)) == len(jobs)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [Zero.NONE, Zero.PARAMETERS])
def test_only_what_lies_on_the_host_is_left_there(zero: Zero, tmp_path: Path) -> None:
    pins = {
        "zero_levels": (zero,),
        "offloads": (Offload.OPTIMIZER,),
        "recompute": NOTHING_RUNS_AGAIN,
    }
    plan = pinned_plan("gpt2.py", ("layers=4",), precision=Precision.BF16, **pins)
    assert len(dry_runs(ranks_of(plan, tmp_path)[:1])) == 1


CLIPPED = "norm = clip_by_global_norm("


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (
            "loss_of(model, batch)",
            "loss_of(model, {k: v.cpu() for k, v in batch.items()})",
            "pretended",
        ),
        (
            CLIPPED,
            f"torch.distributed.all_reduce(torch.ones(1))\n    {CLIPPED}",
            "tensors must be on pretended and dense, found one on cpu",
        ),
    ],
)
def test_a_tensor_that_stays_on_the_cpu_is_told(
    ours: str, theirs: str, told: str, tmp_path: Path
) -> None:
    plan = pinned_plan("gpt2.py", ("layers=4",), **KINDS["ddp"])
    first, _ = ranks_of(plan, tmp_path)
    script = first[0]
    text = script.read_text(encoding="utf-8")
    assert ours in text
    script.write_text(text.replace(ours, theirs), encoding="utf-8")
    with pytest.raises(RuntimeError, match=told):
        dry_runs([first])
