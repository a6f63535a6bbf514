"""Keeps microbatches of one row from models that take none: `x.squeeze()`, norms of one number."""

from __future__ import annotations

from math import prod

from autopar.planner.errors import InfeasibleError
from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.plan.declared.constraints import Constraints
from autopar.planner.rules.table import takes_statistics


def least_rows(graph: Graph, *, data: int) -> int:
    """Return the fewest rows that a microbatch may have on each of so many data ranks."""
    is_lone = _squeezing_rows(graph) is not None or (data == 1 and _norm_of_rows(graph) is not None)
    return 2 if is_lone else 1


def check_lone_rows(constraints: Constraints, graph: Graph) -> None:
    """Raise an error where constraints leave microbatches of one row to a model that takes none."""
    squeezing, norm = _squeezing_rows(graph), _norm_of_rows(graph)
    least, data = constraints.microbatch, constraints.data or 1
    expected = "two rows or more in each microbatch"
    if squeezing is not None and (least == 1 or constraints.global_batch == data):
        raise InfeasibleError(
            f"a microbatch would have one row, which {squeezing.name} squeezes away",
            where=squeezing.location,
            expected=expected,
            fix="name the dim to squeeze (x.squeeze(-1)), or take a larger global batch",
        )
    is_lone = (least == 1 and constraints.data == 1) or constraints.global_batch == 1
    if norm is not None and is_lone:
        raise InfeasibleError(
            f"a microbatch would have one row, and {norm.name} norms one number for each row",
            where=norm.location,
            expected=f"{expected}, or data ranks, which share the statistics of theirs",
            fix="take a larger microbatch, or leave it out",
        )


def _norm_of_rows(graph: Graph) -> Op | None:
    """Return the first batch norm in training that has one number for each row and channel."""
    for op in graph.ops:
        if takes_statistics(op):
            rows, _, *rest = graph.tensors[op.inputs[0]].shape
            if not rows.is_constant and prod(size.at(1) for size in (rows, *rest)) == 1:
                return op
    return None


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
