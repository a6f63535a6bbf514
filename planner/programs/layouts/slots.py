"""Finds which tensors and axes of different layers stand in the same place: slots.

Layers of one class are solved once, so the tensors at the same place of its layers have one layout.
The output of a block is the input of the next, which is at the place of the first block's input:
following such chains (a union-find) unites what crosses layers, tied and shared parameters too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from networkx.utils import UnionFind

from autopar.planner.axes.infer import Axes
from autopar.planner.graph import Graph
from autopar.planner.layers import Layer, Layers
from autopar.planner.layouts import Kind, Layout, OpLayout
from autopar.planner.rules.terms import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Every tensor's slot and every axis' common name, each the name of one of its members."""

    tensors: Mapping[str, str]
    axes: Mapping[str, str]

    def common(self, layout: Layout) -> Layout:
        """Return a layout in the common name of its axis."""
        if layout.kind is not Kind.SPLIT:
            return layout
        return Layout(layout.kind, self.axes[layout.axis], layout.dim)

    def own(self, layout: Layout, tensor: str, axes: Axes) -> Layout:
        """Return a layout in the axis of one tensor itself."""
        if layout.kind is not Kind.SPLIT:
            return layout
        common = self.axes[layout.axis]
        inside = [leaf.name for leaf in leaves(axes.dims[tensor][layout.dim])]
        axis = next(name for name in inside if self.axes[name] == common)
        return Layout(layout.kind, axis, layout.dim)

    def tells_apart(self, tensor: str, dim: int, axes: Axes) -> bool:
        """Whether the axes in a dim still have different common names."""
        inside = {leaf.name for leaf in leaves(axes.dims[tensor][dim])}
        return len({self.axes[name] for name in inside}) == len(inside)


def find_slots(graph: Graph, axes: Axes, layers: Layers) -> Slots:
    """Return the slots of all tensors and axes of a graph."""
    tensors, names = UnionFind(graph.tensors), UnionFind(axes.names)
    for first, other in _places(layers):
        tensors.union(first, other)
        for mine, theirs in zip(axes.dims[first], axes.dims[other], strict=True):
            for a, b in zip(leaves(mine), leaves(theirs), strict=False):
                names.union(a.name, b.name)
    return Slots(tensors=_firsts(tensors), axes=_firsts(names))


def _firsts(unions: UnionFind) -> Mapping[str, str]:
    """Return for each name the first of those that it is united with."""
    first: dict[str, str] = {}
    return {name: first.setdefault(unions[name], name) for name in unions}


def own_layouts(
    layouts: tuple[tuple[OpLayout, ...], ...], layer: Layer, axes: Axes, slots: Slots
) -> tuple[OpLayout, ...]:
    """Return the layouts of the ops of one layer, in the axes of its own tensors."""

    def translated(
        strategy: OpLayout, inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> OpLayout:
        needs = tuple(map(slots.own, strategy.needs, inputs, (axes,) * len(inputs)))
        gives = tuple(map(slots.own, strategy.gives, outputs, (axes,) * len(outputs)))
        axis = next((x.axis for x in (*gives, *needs) if x.axis), "")
        return OpLayout(letter=strategy.letter, axis=axis, needs=needs, gives=gives)

    chosen = layouts[layer.layer_class]
    return tuple(
        translated(strategy, op.inputs, op.outputs)
        for op, strategy in zip(layer.ops, chosen, strict=True)
    )


def _places(layers: Layers) -> Iterator[tuple[str, str]]:
    """Yield the tensors of the first layer of each class with those of the others."""
    for layer_class in layers.classes:
        first, *others = (layers.layers[i] for i in layer_class.layers)
        for other in others:
            for mine, theirs in zip(first.ops, other.ops, strict=True):
                yield from zip(mine.inputs, theirs.inputs, strict=True)
                yield from zip(mine.outputs, theirs.outputs, strict=True)
