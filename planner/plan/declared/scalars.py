"""Keeps parameters without dims, which cannot be cut, from the levels of ZeRO that cut them."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import InfeasibleError
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import Constraints


def with_whole_scalars(constraints: Constraints, graph: Graph) -> Constraints:
    """Return the constraints without ZeRO-2 and 3, where a parameter is a single number."""
    scalar = next((one.name for one in graph.parameters if not one.shape), None)
    if scalar is None or constraints.data == 1:
        return constraints
    levels = tuple(level for level in constraints.zero_levels if level < Zero.GRADIENTS)
    if not levels:
        raise InfeasibleError(
            f"ZeRO-2 and 3 cut every parameter, and {scalar} has no dim to cut",
            expected="zero=0 or zero=1 for a model with a parameter that is a single number",
            fix="allow zero=1, or give the parameter a dim: nn.Parameter(torch.tensor([1.0]))",
        )
    return replace(constraints, zero_levels=levels)
