"""Finds whether data ranks may have unlike numbers of rows, each of which weighs by its own."""

from __future__ import annotations

from autopar.planner.findings.counting import division_of
from autopar.planner.findings.loss_of_parts import Follows, all_of_parts, is_weighed_division
from autopar.planner.findings.meeting_rows import meeting_rows
from autopar.planner.graph import Graph


def may_be_uneven(graph: Graph) -> bool:
    """Whether rows do not meet, and the loss of the batch follows from those of unequal parts."""
    if graph.fixed_batch is not None or meeting_rows(graph) is not None:
        return False
    return parts_have_weights(graph)


def parts_have_weights(graph: Graph) -> bool:
    """Whether the loss of a batch is a weighed mean, or a sum, of the losses of unequal parts.

    A part weighs by its rows, and each mean that the loss adds up by what it counts of them. A mean
    that is divided by another mean is none of these: its count is not a sum over the parts.
    """
    follows = all_of_parts(graph)
    if follows[graph.loss] not in (Follows.MEAN, Follows.SUM):
        return False
    divisions = [
        division_of(graph, op) for op in graph.ops if is_weighed_division(op, graph, follows)
    ]
    names = [name for one in divisions if one is not None for name in (one.counted, *one.counts)]
    return all(follows[name] is Follows.SUM for name in names)
