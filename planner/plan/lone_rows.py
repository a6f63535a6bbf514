"""Keeps microbatches of one row from a model that would take one row for none: `x.squeeze()`."""

from __future__ import annotations

from autopar.planner.errors import InfeasibleError
from autopar.planner.graph import Graph, Op
from autopar.planner.plan.constraints import Constraints


def least_rows(graph: Graph) -> int:
    """Return the fewest rows that a microbatch of a model may have."""
    return 1 if _squeezing_rows(graph) is None else 2


def check_lone_rows(constraints: Constraints, graph: Graph) -> None:
    """Raise an error where constraints leave microbatches of one row to a model that takes none."""
    op = _squeezing_rows(graph)
    is_lone = constraints.microbatch == 1 or constraints.global_batch == (constraints.data or 1)
    if op is not None and is_lone:
        raise InfeasibleError(
            f"a microbatch would have one row, which {op.name} squeezes away",
            where=op.location,
            expected="two rows or more in each microbatch",
            fix="name the dim to squeeze (x.squeeze(-1)), or take a larger global batch",
        )


def _squeezing_rows(graph: Graph) -> Op | None:
    """Return the first op that drops the dim of the rows where there is one row only."""
    for op in graph.ops:
        if op.target.split(".")[1] in ("squeeze", "squeeze_"):
            shape = graph.tensors[op.inputs[0]].shape
            given = dict(op.arguments).get("dim")
            asked = given if isinstance(given, tuple) else (given,)
            dims = range(len(shape)) if given is None else (d for d in asked if isinstance(d, int))
            if any(not shape[dim].is_constant and shape[dim].at(1) == 1 for dim in dims):
                return op
    return None
