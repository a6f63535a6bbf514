"""Rules out plans that print code of a model which changes gradients, or takes some, by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.planner.costs.prediction import Zero
from autopar.planner.graph import Graph
from autopar.planner.ops import GradientUse, OwnGradient
from autopar.planner.plan.declared.constraints import Constraints, Declared, constraints_of

_ROOT = ""


def with_own_gradients(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints without what would have a model's own work on gradients go wrong.

    A tensor rank has a share of a gradient, or a partial sum of it. Where the model takes a
    gradient, all that this flows through has to be in one place: no stage, and no gathered copy
    of parameters that is freed before the second backward. One that is kept to be looked at
    trains nothing.
    """
    own = tuple(one for found in graph.own_gradients for one in _demands(found))
    return constraints_of((*constraints.declared, *own)) if own else constraints


def _demands(found: OwnGradient) -> Iterator[Declared]:
    if found.use is GradientUse.KEPT:
        return
    why = gradient_words(found)
    is_taken = found.use is GradientUse.TAKEN
    yield _declared("tp", "max_tensor", 1, "at most tp=1", why)
    if is_taken or found.call == _ROOT:  # the code of the root stands in every stage anew
        yield _declared("pp", "max_pipeline", 1, "at most pp=1", why)
    if is_taken:
        levels = (Zero.NONE, Zero.OPTIMIZER)
        yield _declared("zero", "zero_levels", levels, "zero=0 or zero=1", why)


def gradient_words(found: OwnGradient) -> str:
    """Say what a model does with gradients, and where."""
    does = "takes" if found.use is GradientUse.TAKEN else "changes"
    return f"the model {does} gradients by itself, by {found.how} at {found.where}"


def _declared(name: str, field: str, value: Any, text: str, why: str) -> Declared:
    return Declared(place=f"gradients {name}", field=field, value=value, text=text, origin=why)
