"""Tells which sizes of a graph follow the lengths of its inputs, from a trace of other lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autopar.planner.axes.infer import Axes
from autopar.planner.axes.terms import Dim, Leaf, substituted
from autopar.planner.extent import Extent
from autopar.planner.graph import Call, Graph, Op, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What a graph's sizes are where its inputs have other lengths; all the same where unknown."""

    shapes: Mapping[str, tuple[Extent, ...]]
    arguments: Mapping[str, Mapping[str, Value]]  # of each op
    calls: Mapping[str, Call]
    axes: Mapping[str, Extent]  # the sizes of axes

    def shape(self, tensor: str, graph: Graph) -> tuple[Extent, ...]:
        """Return the other shape of a tensor."""
        return self.shapes.get(tensor, graph.tensors[tensor].shape)

    def argument(self, op: Op, name: str) -> Value:
        """Return what an argument of an op is at other lengths."""
        return self.arguments[op.name][name] if op.name in self.arguments else op.argument(name)

    def dim(self, dim: Dim) -> Dim:
        """Return a dim with its other size."""
        return substituted(dim, lambda leaf: Leaf(leaf.name, self.axes.get(leaf.name, leaf.size)))


FIXED = Lengths(shapes={}, arguments={}, calls={}, axes={})


def lengths_of(graph: Graph, other: Graph | None, axes: Axes) -> Lengths:
    """Return what differs between a graph and the one of other lengths."""
    if other is None:
        return FIXED
    shapes = {t.name: t.shape for t in other.tensors.values()}
    sizes = {
        dim.name: size
        for name in graph.tensors
        for dim, size in zip(axes.dims[name], shapes[name], strict=True)
        if isinstance(dim, Leaf)
    }
    return Lengths(
        shapes=MappingProxyType(shapes),
        arguments=MappingProxyType({op.name: dict(op.arguments) for op in other.ops}),
        calls=other.calls,
        axes=MappingProxyType(sizes),
    )
