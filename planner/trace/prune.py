"""Drops the ops that neither the loss nor a buffer depends on, and marks the calls they ran in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import MappingProxyType

from autopar.planner.graph import Graph, Op, Origin


def _callers(unused: Iterable[str], live: Iterable[str], graph: Graph) -> Iterator[str]:
    """Yield the calls around dead ones, up to those in which something lives.

    Their code calls what is dead, perhaps with what is not computed.
    """
    needed = {around for call in live for around in _around(call, graph)}
    for call in unused:
        for around in _around(call, graph):
            yield around
            if around in needed:
                break


def _around(call: str, graph: Graph) -> Iterator[str]:
    """Yield a call and those around it, the innermost first."""
    key: str | None = call
    while key is not None and key in graph.calls:
        yield key
        key = graph.calls[key].parent


def pruned(graph: Graph) -> Graph:
    """Return the graph without dead ops and without tensors that nothing uses."""
    buffers = {t.name for t in graph.tensors.values() if t.origin is Origin.BUFFER}
    live, live_storages = {graph.loss}, set(buffers)
    kept: list[Op] = []
    unused: set[str] = set()
    for op in reversed(graph.ops):
        writes = any(graph.tensors[name].storage in live_storages for name in op.writes)
        if writes or not live.isdisjoint(op.outputs):
            kept.append(op)
            live.update(op.inputs, op.outputs)
            live_storages.update(graph.tensors[name].storage for name in op.inputs)
        elif any(graph.tensors[name].requires_grad for name in op.inputs):
            unused.add(op.call)
    unused |= set(_callers(unused, {op.call for op in kept}, graph))
    outside = {t.name for t in graph.tensors.values() if t.origin is not Origin.OP}
    tensors = {name: t for name, t in graph.tensors.items() if name in live or name in outside}
    calls = {
        key: replace(call, has_unused=True) if key in unused else call
        for key, call in graph.calls.items()
    }
    names = {op.name for op in kept}
    functions = (
        replace(one, ops=tuple(name for name in one.ops if name in names))
        for one in graph.functions
    )
    return replace(
        graph,
        ops=tuple(reversed(kept)),
        functions=tuple(one for one in functions if one.ops),
        tensors=MappingProxyType(tensors),
        calls=MappingProxyType(calls),
    )
