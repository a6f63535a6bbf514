"""What is planned on several clusters: a traced model and what is demanded of its training."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.axes.infer import Axes
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.plan.plan import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A traced model, and all that a search on any machines needs to know beside them."""

    graph: Graph
    axes: Axes
    layers: Layers
    model: Model
    constraints: Constraints
    measured: Measurements | None = None
