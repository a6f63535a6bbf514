"""Finds the buffers that a step writes once, whatever rows it has: counts, power iterations."""

from __future__ import annotations

from autopar.planner.findings.loss_of_parts import Follows, all_of_parts
from autopar.planner.graph import Graph
from autopar.planner.ops import Op, Origin


def steady_buffers(graph: Graph) -> tuple[str, ...]:
    """Return the buffers that the forward writes without regard to rows.

    Each microbatch would write them again: a count of steps would run ahead. The count of a batch
    norm is none of them: its statistics are those of each microbatch.
    """
    of_parts = all_of_parts(graph)
    steady = {buffer.name for buffer in graph.buffers}
    written = set[str]()
    for op in graph.ops:
        own = written_buffers(op, graph)
        written |= own
        is_of_norm = op.call in graph.calls and graph.calls[op.call].is_batch_norm
        if is_of_norm or any(of_parts[name] is not Follows.ALIKE for name in op.inputs):
            steady -= own
    return tuple(one.name for one in graph.buffers if one.name in steady & written)


def written_buffers(op: Op, graph: Graph) -> set[str]:
    """Return the buffers that an op writes to."""
    storages = graph.index.written_by(op)
    return {name for name in storages if graph.tensors[name].origin is Origin.BUFFER}
