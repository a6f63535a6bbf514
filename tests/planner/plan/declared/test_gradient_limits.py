"""Plans that would have a model's own work on gradients go wrong are ruled out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.planner.costs.prediction import Zero
from autopar.planner.graph.ops import LOSS_CALL, GradientUse, OwnGradient
from autopar.planner.plan.declared.limits import gradient_words, with_own_gradients
from tests.planner.plan.searches import declared
from tests.planner.subjects import zoo_graph

FREE = declared(global_batch=8)
EVERY = FREE.zero_levels
LAYER, ROOT = "transformer.h.0", ""


def own(use: GradientUse, call: str) -> OwnGradient:
    return OwnGradient(call=call, use=use, how="Tensor.register_hook", where="model.py:3")


@pytest.mark.parametrize(
    ("use", "call", "limits"),
    [
        (GradientUse.CHANGED, LAYER, (1, None, EVERY)),
        (GradientUse.CHANGED, ROOT, (1, 1, EVERY)),
        (GradientUse.TAKEN, LAYER, (1, 1, (Zero.NONE, Zero.OPTIMIZER))),
        (GradientUse.TAKEN, LOSS_CALL, (1, 1, (Zero.NONE, Zero.OPTIMIZER))),
        (GradientUse.KEPT, ROOT, (None, None, EVERY)),
    ],
)
def test_what_a_model_does_with_gradients_limits_a_plan(
    use: GradientUse, call: str, limits: tuple[Any, ...]
) -> None:
    graph = replace(zoo_graph("gpt2.py"), own_gradients=(own(use, call),))
    found = with_own_gradients(FREE, graph)
    assert (found.max_tensor, found.max_pipeline, found.zero_levels) == limits


def test_a_model_that_leaves_gradients_alone_has_every_plan() -> None:
    assert with_own_gradients(FREE, zoo_graph("gpt2.py")) is FREE


def test_it_is_said_what_the_model_does_and_where() -> None:
    assert gradient_words(own(GradientUse.CHANGED, ROOT)) == (
        "the model itself changes gradients, by Tensor.register_hook at model.py:3"
    )
    assert "takes gradients" in gradient_words(own(GradientUse.TAKEN, ROOT))
