"""Scripts train on rows of unlike lengths as one process does, whatever their plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.codegen.equality import compare
from tests.codegen.plans import plan_for

KINDS = ("nanogpt", "gpt2", "llama", "t5", "bert", "captioner")
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": (1, 2, 1), "microbatch": 1},
    "tp": {"degrees": (1, 1, 2), "microbatch": 2, "split": ("heads",)},
    "sp": {"degrees": (1, 1, 2), "microbatch": 2, "split": ("heads", "seq")},
    "pp": {"degrees": (2, 1, 1), "microbatch": 1},
    "pp tp": {"degrees": (2, 1, 2), "microbatch": 1},
}


@cache
def _traced(kind: str) -> tuple[ModelFile, Graph]:
    file = load_model_file(str(Path(__file__).parent / "unlike_rows.py"), (f"kind={kind}",))
    return file, trace(file)


def planned(kind: str, way: str) -> Plan:
    """Return the plan of a model that is laid out in one way."""
    file, graph = _traced(kind)
    pins = dict(WAYS[way])
    if kind == "llama" and "split" in pins:  # whose queries share keys
        pins["split"] = ("kv_heads", *pins["split"][1:])
    return plan_for(file, graph, (f"kind={kind}",), global_batch=4, **pins)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_three_lengths_train_as_in_one_process(kind: str, way: str) -> None:
    found = compare(planned(kind, way), steps=4)
    assert found.is_within(1e-10)
