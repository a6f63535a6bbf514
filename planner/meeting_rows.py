"""Finds where the rows of a batch meet: there a training split over its rows has another loss."""

from __future__ import annotations

from autopar.planner.graph import Graph, Op
from autopar.planner.loss_of_parts import Follows, loss_of_parts


def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that learns from all rows at once.

    It compares every pair of rows, as contrastive losses do, or makes of the rows' mean or sum what
    is no mean of that of their parts, as a root does.
    """
    for op in graph.ops:
        for name in op.outputs:
            tensor = graph.tensors[name]
            varying = [size for size in tensor.shape if not size.is_constant]
            if tensor.requires_grad and len(varying) > 1:
                return op
    whole = loss_of_parts(graph)
    return whole.op if whole.follows is Follows.MEETS else None
