"""Keeps plans from what would have a model's optimizer train otherwise (optimizer_probe.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.planner.costs.prediction import Zero
from autopar.planner.graph import Graph
from autopar.planner.model_file import ModelFile
from autopar.planner.optimizer_probe import OptimizerTraits, Reach, optimizer_traits
from autopar.planner.plan.constraints import Constraints, Declared, constraints_of


def with_optimizer(constraints: Constraints, model_file: ModelFile, graph: Graph) -> Constraints:
    """Return the constraints with what the model's optimizer demands of a plan."""
    traits = optimizer_traits(model_file, graph)
    own = () if traits is None else tuple(_demands(traits))
    return constraints_of((*constraints.declared, *own)) if own else constraints


def _demands(traits: OptimizerTraits) -> Iterator[Declared]:
    if traits.reach >= Reach.PARAMETER:
        why = f"{traits.name} updates a parameter as a whole"
        yield _declared("tp", "max_tensor", 1, "at most tp=1", why)
        yield _declared("zero", "zero_levels", (Zero.NONE,), "zero=0", why)
    if traits.reach is Reach.MODEL:
        why = f"{traits.name} updates all parameters as a whole"
        yield _declared("pp", "max_pipeline", 1, "at most pp=1", why)
    elif traits.groups_by_place:
        why = "build_optimizer groups parameters by their places"
        yield _declared("pp", "max_pipeline", 1, "at most pp=1", why)


def _declared(name: str, field: str, value: Any, text: str, why: str) -> Declared:
    return Declared(place=f"optimizer {name}", field=field, value=value, text=text, origin=why)
