"""Scripts whose loss makes its logits in chunks train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.codegen.emit import emit
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.errors import InputError
from autopar.planner.plan.declared.constraints import RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.plans import pinned_plan

CHUNKED = (RecomputePin(modules="lm_head", mode=Recompute.CHUNKED),)
AGAIN = (RecomputePin(modules="*", mode=Recompute.FULL), *CHUNKED)
ZBV = {"schedules": (ScheduleKind.ZERO_BUBBLE_V,), "stages_per_rank": 2, "microbatch": 2}
KINDS: dict[str, dict[str, Any]] = {
    "one": {"microbatch": 2},
    "zero 1": {"data": 2, "zero_levels": (Zero.OPTIMIZER,)},
    "zero 2": {"data": 2, "zero_levels": (Zero.GRADIENTS,), "microbatch": 2},
    "zero 3": {"data": 2, "zero_levels": (Zero.PARAMETERS,), "microbatch": 2},
    "zero 3, recomputed": {"data": 2, "zero_levels": (Zero.PARAMETERS,), "recompute": AGAIN},
    "vocabulary": {"tensor": 2, "split": ("vocab",)},
    "sequence": {"tensor": 2, "split": ("seq", "vocab")},
    "pipeline": {"pipeline": 2, "microbatch": 2},
    "halves": {"pipeline": 2, **ZBV},
    "all": {"pipeline": 2, "tensor": 2, "split": ("vocab",), "microbatch": 2},
}
STAND = ("zero 3", "vocabulary")


def chunked(kind: str, model: str = "llama.py") -> Plan:
    """Return the plan of a kind with a loss in chunks."""
    return pinned_plan(model, ("layers=4",), **{"recompute": CHUNKED, **KINDS[kind]})


@pytest.mark.parametrize("kind", cells(tuple(KINDS), STAND))
def test_a_loss_in_chunks_trains_as_one_process_does(kind: str, tmp_path: Path) -> None:
    plan = chunked(kind)
    assert "chunk_logits(layer, LOSS_CHUNKS)" in emit(plan, destination=tmp_path / "train.py")

    found = compare(plan, steps=3)

    assert found.is_within(1e-9), found


@pytest.mark.parametrize("kind", cells(("zero 3", "vocabulary", "pipeline"), ("zero 3",)))
def test_tied_heads_and_losses_of_the_model_file_train_so_too(kind: str) -> None:
    assert compare(chunked(kind, "gpt2.py"), steps=3).is_within(1e-9)


def test_fp16_has_no_loss_in_chunks() -> None:
    with pytest.raises(InputError, match="gradients of the unscaled loss"):
        pinned_plan("llama.py", recompute=CHUNKED, precision=Precision.FP16)
