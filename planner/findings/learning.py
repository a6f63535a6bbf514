"""Finds the parameters that a gradient of the loss reaches: others stay as an optimizer has them.

A teacher under `torch.no_grad()`, or one whose outputs are detached, has weights that could learn
and do not. An optimizer leaves out what has no gradient; zeros in its place would decay.
"""

from __future__ import annotations

from autopar.planner.graph import Graph


def learning_parameters(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that have a gradient after a backward of the loss."""
    tensors = graph.tensors
    reached, written = {graph.loss}, {tensors[graph.loss].storage}
    for op in reversed(graph.ops):
        if not any(tensors[name].requires_grad for name in op.outputs):
            continue
        if not reached.isdisjoint(op.outputs) or any(
            tensors[name].storage in written for name in op.writes
        ):
            reached.update(op.inputs)
            written.update(tensors[name].storage for name in op.inputs)
    return frozenset(one.name for one in graph.parameters if one.trainable) & reached
