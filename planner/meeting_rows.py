"""Finds where the rows of a batch meet: there a training split over its rows has another loss."""

from __future__ import annotations

from autopar.planner.graph import Graph, Op
from autopar.planner.loss_of_parts import Follows, all_of_parts, loss_of_parts


def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that learns from all rows at once.

    It compares every pair of rows, as contrastive losses do, gives rows what all of them have made,
    as centering does, or makes of the rows' mean or sum what is no mean of that of their parts, as
    a root does. An embedding may divide its gradient by how often all rows name an entry.
    """
    of_parts = all_of_parts(graph)
    for op in graph.ops:
        learning = [name for name in op.outputs if graph.tensors[name].requires_grad]
        if any(_varying(graph, name) > 1 for name in learning):
            return op
        if learning and dict(op.arguments).get("scale_grad_by_freq"):
            return op
        shared = (name for name in op.inputs if graph.tensors[name].requires_grad)
        if any(_varying(graph, name) for name in learning) and any(
            of_parts[name] not in (Follows.ALIKE, Follows.ROWS) for name in shared
        ):
            return op
    whole = loss_of_parts(graph)
    return whole.op if whole.follows is Follows.MEETS else None


def _varying(graph: Graph, name: str) -> int:
    """Return how many sizes of a tensor depend on the batch."""
    return sum(not size.is_constant for size in graph.tensors[name].shape)
