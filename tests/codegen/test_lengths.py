"""Scripts train on rows of unlike lengths as a plain loop does, whatever their plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.proof.exactness import ExactMode, all_steps, clipped_share, trained_tensors
from autopar.planner.graph.graph import Graph
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.weights.plain_model import plain_model
from tests.cells import cells
from tests.codegen import unlike_rows
from tests.codegen.equality import trained_by_script
from tests.codegen.plain_loop import default_optimizer
from tests.codegen.plans import plan_for

KINDS = ("nanogpt", "gpt2", "llama", "t5", "bert", "captioner", "listener")
WAYS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": (1, 2, 1), "microbatch": 1},
    "tp": {"degrees": (1, 1, 2), "microbatch": 2, "split": ("heads",)},
    "sp": {"degrees": (1, 1, 2), "microbatch": 2, "split": ("heads", "ffn", "vocab", "seq")},
    "pp": {"degrees": (2, 1, 1), "microbatch": 1},
    "pp tp": {"degrees": (2, 1, 2), "microbatch": 1},
}
OWN_AXES = {"llama": {"heads": "kv_heads"}, "listener": {"vocab": "classes"}}
CELLS = [(kind, way) for kind in KINDS for way in ("dp", "tp", "sp", "pp")] + [("llama", "pp tp")]
# Each way, but for "tp": "sp" splits the heads, too, and more.
STAND = {("nanogpt", "sp"), ("bert", "dp"), ("listener", "pp")}
GLOBAL_BATCH, STEPS, TOLERANCE = 4, 4, 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What a loop saw and made."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


@cache
def train_plainly(kind: str) -> Plain:
    """Train as people do on one device: the whole global batch at once, padded to its longest."""
    model = plain_model(partial(unlike_rows.build_model, kind), seed=0).double()
    optimizer, scheduler = default_optimizer(model, all_steps(STEPS))
    rows, collate = unlike_rows.build_dataset(kind), unlike_rows.build_collate(kind)
    numbers = torch.Generator().manual_seed(mixed_seed(0, 0))
    order = torch.randperm(len(unlike_rows.Rows(kind)), generator=numbers).tolist()
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        chosen = [rows[order.pop(0)] for _ in range(GLOBAL_BATCH)]
        batch = {k: v.double() if v.is_floating_point() else v for k, v in collate(chosen).items()}
        with ExactMode(torch.float64):  # without the casts to float32 inside of models
            found = model(**batch)
            loss = found if isinstance(found, Tensor) else found.loss
            loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), torch.inf)))
        nn.utils.clip_grad_norm_(model.parameters(), norms[-1] * clipped_share(step))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    trained = {name: one.detach() for name, one in trained_tensors(model)}
    return Plain(losses=losses, norms=norms, parameters=trained)


@cache
def _traced(kind: str) -> tuple[ModelFile, Graph]:
    file = load_model_file(str(Path(unlike_rows.__file__)), (f"kind={kind}",))
    return file, trace(file)


def planned(kind: str, way: str, **more: Any) -> Plan:
    """Return the plan of a model that is laid out in one way."""
    file, graph = _traced(kind)
    pins = {**WAYS[way], **more}
    if "split" in pins:
        pins["split"] = tuple(OWN_AXES.get(kind, {}).get(axis, axis) for axis in pins["split"])
    return plan_for(file, graph, (f"kind={kind}",), global_batch=GLOBAL_BATCH, **pins)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), cells(CELLS, STAND))
def test_rows_of_three_lengths_train_as_in_a_plain_loop(kind: str, way: str) -> None:
    plain = train_plainly(kind)
    found = trained_by_script(planned(kind, way), steps=STEPS, data="dataset", dtype="float64")
    assert found.losses == pytest.approx(plain.losses, abs=TOLERANCE)
    assert found.norms == pytest.approx(plain.norms, abs=TOLERANCE)
    assert found.parameters.keys() == plain.parameters.keys()
    for name, value in plain.parameters.items():
        torch.testing.assert_close(
            found.parameters[name], value.double(), atol=TOLERANCE, rtol=0.0, msg=name
        )
