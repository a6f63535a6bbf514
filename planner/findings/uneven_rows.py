"""Finds whether data ranks may have unlike numbers of rows: each loss weighs by what it counts."""

from __future__ import annotations

from autopar.planner.findings.counting import counted_by, is_told
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.graph import Graph
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


def may_be_uneven(graph: Graph) -> bool:
    """Whether the loss is one mean over targets that the batch tells, and rows do not meet.

    The loss of such a model is weighed by the number of these on each rank, so it does not matter
    how many rows that has. Batch norms would average statistics of unlike numbers of rows.
    """
    if graph.fixed_batch is not None or meeting_rows(graph) is not None:
        return False
    if any(kind_of(op) is OpKind.BATCH_NORM for op in graph.ops):
        return False
    maker = graph.index.made_by.get(graph.loss)
    names = counted_by(maker, graph) if maker is not None else ()
    return bool(names) and is_told(graph, names)
