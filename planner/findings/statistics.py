"""Finds the batch norms that normalise rows by statistics of all rows of a microbatch."""

from __future__ import annotations

from autopar.planner.graph import Graph
from autopar.planner.ops import Op
from autopar.planner.rules.table import takes_statistics


def norm_of_rows(graph: Graph) -> Op | None:
    """Return the first batch norm in training whose statistics are of the rows of a batch.

    Data ranks share such statistics. Microbatches cannot: one has been normalised, and its backward
    may be done, before the next one is there.
    """
    for op in graph.ops:
        if takes_statistics(op):
            shape = graph.tensors[op.inputs[0]].shape
            if any(not size.is_constant for size in shape):
                return op
    return None
