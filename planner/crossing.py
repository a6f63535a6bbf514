"""Finds in which layers tensors are made and used, and so what crosses a cut between layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.rules.random_ops import is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The layer of each op, the layer that makes each tensor, the layers that use it."""

    home: Mapping[str, int]
    maker: Mapping[str, int]
    users: Mapping[str, frozenset[int]]
    cuts: tuple[tuple[str, ...], ...]  # what crosses behind each layer


def residence(graph: Graph, layers: Layers) -> Residence:
    """Return where the tensors of a graph are made, used, and which cuts they cross.

    What is computed from weights or from random numbers crosses: the rest is made again on every
    stage that needs it, and inputs are on every stage.
    """
    home = {op.name: at for at, layer in enumerate(layers.layers) for op in layer.ops}
    maker = {name: home[op.name] for name, op in graph.index.made_by.items()}
    drawn = (name for op in graph.ops if is_random(op) for name in op.outputs)
    once = computed_once(graph, drawn)
    last_use = _last_uses(graph, home, once)
    cuts: list[list[str]] = [[] for _ in layers.layers]
    for name, made in maker.items():
        if name in once:
            for position in range(made, last_use.get(name, made)):
                cuts[position].append(name)
    return Residence(
        home=home,
        maker=maker,
        users={
            name: frozenset(home[op.name] for op in ops)
            for name, ops in graph.index.readers.items()
        },
        cuts=tuple(map(tuple, cuts)),
    )


def computed_once(graph: Graph, drawn: Iterable[str]) -> frozenset[str]:
    """Return what one stage alone computes: from weights, or from these random numbers.

    So it is with results of an op that keeps statistics: a norm of a teacher that does not learn.
    """
    found = {tensor.name for tensor in graph.tensors.values() if tensor.requires_grad}
    found -= {parameter.name for parameter in graph.parameters}
    found.update(drawn)
    found.update(_beside_statistics(graph))
    return frozenset(found.union(*(op.outputs for op in graph.index.reached_from(found))))


def _beside_statistics(graph: Graph) -> Iterator[str]:
    """Yield what ops return that write to a buffer besides."""
    buffers = {buffer.name for buffer in graph.buffers}
    for op in graph.ops:
        if not buffers.isdisjoint(graph.index.written_by(op)):
            yield from (name for name in op.outputs if graph.tensors[name].storage not in buffers)


def _last_uses(graph: Graph, home: Mapping[str, int], once: frozenset[str]) -> Mapping[str, int]:
    """Return the last layer that needs each tensor, be it to make again what it uses itself."""
    last: dict[str, int] = {}
    for op in reversed(graph.ops):
        is_again = not once.intersection(op.outputs)
        later = [last[name] for name in op.outputs if is_again and name in last]
        at = max([home[op.name], *later])
        for name in op.inputs:
            last[name] = max(at, last.get(name, at))
    return last
