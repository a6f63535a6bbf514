"""Turns the collectives inside a loss whose classes are split over the ranks into seconds."""

from __future__ import annotations

from autopar.planner.cluster.link import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.ops.shapes import LocalShapes
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of

_ROW_BYTES = 4  # of the fp32 figure that each row of logits has


def split_loss_seconds(shapes: LocalShapes, shape: GroupShape) -> float:
    """Return the forward's all-reduces of a vocabulary-parallel loss; its backward needs none.

    One of the rows' maxima, one of their sums of exponentials and their target's logit together.
    Source: Megatron-LM, section 3 (which sends the last two apart). Nothing for any other op.
    """
    if not splits_classes(shapes):
        return 0.0
    rows = shapes.numel(shapes.op.inputs[0]) // max(1, shapes.letters(("v",)))
    return sum(
        collective_seconds(Collective.ALL_REDUCE, figures * rows * _ROW_BYTES, shape)
        for figures in (1, 2)
    )


def splits_classes(shapes: LocalShapes) -> bool:
    """Whether an op is a loss of whose classes each rank has a part."""
    if kind_of(shapes.op) is not OpKind.CROSS_ENTROPY or shapes.split is None:
        return False
    logits = shapes.graph.tensors[shapes.op.inputs[0]]
    return shapes.letters(("v",)) != logits.shape[1].at(shapes.batch)
