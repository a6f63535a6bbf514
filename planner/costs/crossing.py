"""Finds in which layers tensors are made and used, and so what crosses a cut between layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.planner.graph import Graph
from autopar.planner.layers import Layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The layer of each op, the layer that makes each tensor, the layers that use it."""

    home: Mapping[str, int]
    maker: Mapping[str, int]
    users: Mapping[str, frozenset[int]]
    cuts: tuple[tuple[str, ...], ...]  # what crosses behind each layer


def residence(graph: Graph, layers: Layers) -> Residence:
    """Return where the tensors of a graph are made, used, and which cuts they cross.

    Only tensors with gradients cross: the others are made again on every stage that needs them, and
    inputs are on every stage.
    """
    home = {op.name: at for at, layer in enumerate(layers.layers) for op in layer.ops}
    maker = {out: home[op.name] for op in graph.ops for out in op.outputs}
    users: dict[str, set[int]] = defaultdict(set)
    for op in graph.ops:
        for name in op.inputs:
            users[name].add(home[op.name])
    cuts: list[list[str]] = [[] for _ in layers.layers]
    for name, made in maker.items():
        if graph.tensors[name].requires_grad:
            for position in range(made, max(users[name], default=made)):
                cuts[position].append(name)
    return Residence(
        home=home,
        maker=maker,
        users={name: frozenset(used) for name, used in users.items()},
        cuts=tuple(map(tuple, cuts)),
    )


def crossing(graph: Graph, layers: Layers, position: int) -> tuple[str, ...]:
    """Return the tensors with gradients that live across the cut behind a layer.

    They are made in this layer or before it, and a later layer needs them.
    """
    return residence(graph, layers).cuts[position]
