"""Drops the ops that neither the loss nor a buffer depends on, and marks the calls they ran in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType

from autopar.planner.graph import Graph
from autopar.planner.ops import Origin


def _callers(unused: Iterable[str], live: Iterable[str], graph: Graph) -> Iterator[str]:
    """Yield the calls around dead ones, up to those in which something lives.

    Their code calls what is dead, perhaps with what is not computed.
    """
    needed = {around for call in live for around in graph.index.around(call)}
    for call in unused:
        for around in graph.index.around(call):
            yield around
            if around in needed:
                break


def pruned(graph: Graph) -> Graph:
    """Return the graph without dead ops and without tensors that nothing uses."""
    buffers = (t.name for t in graph.tensors.values() if t.origin is Origin.BUFFER)
    kept = graph.index.needed_for([graph.loss, *buffers])
    live = {graph.loss}.union(*((*op.inputs, *op.outputs) for op in kept))
    names = {op.name for op in kept}
    unused = {
        op.call
        for op in graph.ops
        if op.name not in names and any(graph.tensors[name].requires_grad for name in op.inputs)
    }
    unused |= set(_callers(unused, {op.call for op in kept}, graph))
    tensors = {
        name: t for name, t in graph.tensors.items() if name in live or t.origin is not Origin.OP
    }
    calls = {
        key: replace(call, has_unused=True) if key in unused else call
        for key, call in graph.calls.items()
    }
    functions = (
        replace(one, ops=tuple(name for name in one.ops if name in names))
        for one in graph.functions
    )
    return replace(
        graph,
        ops=kept,
        functions=tuple(one for one in functions if one.ops),
        tensors=MappingProxyType(tensors),
        calls=MappingProxyType(calls),
    )
