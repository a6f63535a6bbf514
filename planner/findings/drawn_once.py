"""Finds random numbers that one device draws once in a step, for all rows of the batch."""

from __future__ import annotations

from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.random_ops import is_random


def drawn_once(graph: Graph) -> Op | None:
    """Return the first op that draws numbers of which the rows of a batch have none of their own.

    A switch that drops a whole layer, noise that is added to a weight, a dropout of a weight.
    """
    return next((op for op in graph.ops if is_random(op) and not _has_rows(op, graph)), None)


def _has_rows(op: Op, graph: Graph) -> bool:
    sizes = (size for name in op.outputs for size in graph.tensors[name].shape)
    return any(not size.is_constant for size in sizes)
