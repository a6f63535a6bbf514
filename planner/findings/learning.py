"""Finds the parameters that a gradient of the loss reaches: others stay as an optimizer has them.

A teacher under `torch.no_grad()`, or one whose outputs are detached, has weights that could learn
and do not. An optimizer leaves out what has no gradient; zeros in its place would decay.
"""

from __future__ import annotations

from autopar.planner.graph import Graph


def learning_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that have a gradient after a backward of the loss."""
    constant = (op for op in graph.ops if not graph.learns(op))
    learning = graph.index.needed_for([graph.loss], without=constant)
    reached = {graph.loss}.union(*(op.inputs for op in learning))
    return frozenset(one.name for one in graph.parameters if one.trainable) & reached
