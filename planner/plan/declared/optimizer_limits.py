"""Lets a plan hold what a model's optimizer keeps and needs, as trying it has shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autopar.planner.costs.prediction import Zero
from autopar.planner.findings.optimizer_probe import OptimizerTraits, Reach
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import Constraints, Declared, constraints_of


def with_moments(graph: Graph, traits: OptimizerTraits | None) -> Graph:
    """Return the graph with what the optimizer keeps of each parameter."""
    if traits is None:
        return graph
    moments = iter(traits.moments)
    parameters = tuple(
        replace(one, moments=next(moments)) if one.trainable else one for one in graph.parameters
    )
    return replace(graph, parameters=parameters)


def with_optimizer(constraints: Constraints, traits: OptimizerTraits | None) -> Constraints:
    """Return the constraints with what would have the optimizer train otherwise ruled out."""
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
    if traits.draws:
        why = f"{traits.name} draws random numbers, which copies of a parameter would not share"
        yield _declared("tp", "max_tensor", 1, "at most tp=1", why)
        yield _declared("copies", "steps_once", True, "no copies that are stepped apart", why)


def _declared(name: str, field: str, value: Any, text: str, why: str) -> Declared:
    return Declared(place=f"optimizer {name}", field=field, value=value, text=text, origin=why)
