"""Every kind of script trains exactly as one process does, to the last digits."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.codegen.proof.comparison import Comparison
from autopar.planner.costs.prediction import Zero
from autopar.planner.plan.plan import Plan
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.kinds import KINDS, plan_of
from tests.codegen.plans import pinned_plan

TOLERANCE = 1e-10

# Padding (bert), several tensors across a cut and a loss of its own (t5), batch norm (resnet),
# grouped queries (llama), no sequence (mnist), PyTorch's own layers (transformer_lm).
OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bert.py", {"data": 2, "microbatch": 2}),
    ("bert.py", {"pipeline": 2, "microbatch": 2}),
    ("t5.py", {"pipeline": 2, "data": 2, "microbatch": 2, "zero_levels": (Zero.OPTIMIZER,)}),
    ("resnet.py", {"data": 2, "microbatch": 2}),
    ("llama.py", {"tensor": 2, "microbatch": 4, "split": ("ffn",)}),
    ("llama.py", {"pipeline": 2, "microbatch": 2}),
    ("vit.py", {"tensor": 2, "microbatch": 4, "split": ("ffn",)}),
    ("mnist.py", {"data": 2, "global_batch": 64}),
    ("intent.py", {"data": 2, "microbatch": 2}),
    ("transformer_lm.py", {"data": 2, "microbatch": 2}),
)


# For the others stands a cell of the matrix: the same kind, of another model.
STAND = ("hsdp", "tp_zero3", "vocab_pp", "pp_zero3", "zero_bubble_v", "all")
OTHERS_STAND = tuple(one for one in OTHERS if one[0] in ("t5.py", "mnist.py", "vit.py"))


def check(plan: Plan, **options: Any) -> Comparison:
    found = compare(plan, **options)
    assert found.losses[-1] != found.losses[0]
    assert found.is_within(TOLERANCE), found
    return found


@pytest.mark.parametrize("kind", cells(KINDS, STAND))
def test_a_script_equals_one_process(kind: str) -> None:
    check(plan_of(kind))


@pytest.mark.parametrize(("name", "pins"), cells(OTHERS, OTHERS_STAND))
def test_other_models_do_too(name: str, pins: dict[str, Any]) -> None:
    check(pinned_plan(name, **pins))


def test_synthetic_batches_are_learnt_alike() -> None:
    found = check(plan_of("tp_dp"), data="synthetic", steps=3)
    assert found.losses[-1] < found.losses[0]


def test_float32_follows_too() -> None:
    found = compare(plan_of("tp_dp"), dtype="float32")
    assert found.loss.largest < 1e-4 * found.losses[0]
