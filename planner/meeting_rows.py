"""Finds where the rows of a batch meet: there a training split over its rows has another loss."""

from __future__ import annotations

from autopar.planner.graph import Graph, Op


def meeting_rows(graph: Graph) -> Op | None:
    """Return the first op that learns from every pair of rows, as contrastive losses do."""
    for op in graph.ops:
        for name in op.outputs:
            tensor = graph.tensors[name]
            varying = [size for size in tensor.shape if not size.is_constant]
            if tensor.requires_grad and len(varying) > 1:
                return op
    return None
