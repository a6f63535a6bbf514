"""Finds ops at equal positions in layers of several classes, so that they are split alike.

Layers of different classes may share most of their code. For example, only some layers have
adapters, the layers before the first adapter have no gradients, or the first layers of a mixture of
experts are dense. A script prints shared code only once, if the ops in it are split alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import refs
from autopar.planner.layers import Layers
from autopar.planner.programs.layouts.problem import LayoutNode, SameChoices, Strategy

_KeyOf = Callable[[Strategy], Hashable]  # choices with equal keys go together
_Ends = list[tuple[int, _KeyOf]]  # nodes, each with the key of its choices


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarNodes:
    """Finds nodes at equal positions of layer classes, and the choices that split them alike."""

    graph: Graph
    axes: GraphAxes
    layers: Layers

    def alike(self, nodes: Sequence[LayoutNode]) -> Iterator[SameChoices]:
        """Yield pairs of nodes of several layer classes, with their choices that go together."""
        places: dict[Hashable, _Ends] = defaultdict(list)
        counts: Counter[Hashable] = Counter()
        made_by = {out: (number, k) for number, k, out in _made_tensors(nodes)}
        for number, node in enumerate(nodes):
            place = self._place_of_op(node)
            if place is not None:
                counts[node.layer_class, place] += 1  # numbers equal ops of one call
                places[place, counts[node.layer_class, place]].append((number, self._strategy))
        for place, tensor in self._results():
            if tensor in made_by:
                number, output = made_by[tensor]
                places[place].append((number, partial(self._gives, output)))
        for first, *others in places.values():
            for other in others:
                yield from _together(first, other, nodes)

    def _place_of_op(self, node: LayoutNode) -> Hashable | None:
        """Return a key of an op's position in its layer; None if the layer is no module."""
        layer, calls = self._layer_of(node.layer_class), self.graph.calls
        if layer is None or layer not in self.graph.index.around(node.op.call):
            return None
        own = calls[node.op.call]
        names = (*node.op.inputs, *node.op.outputs)
        shapes = tuple(self.graph.tensors[name].shape for name in names)
        return self._within(node.op.call, layer), own.class_name, node.op.target, shapes

    def _results(self) -> Iterator[tuple[Hashable, str]]:
        """Yield (position, tensor) for each result of a call in each class's first layer."""
        layers = list(filter(None, map(self._layer_of, range(len(self.layers.classes)))))
        inside: dict[str, list[str]] = {layer: [] for layer in layers}
        for call in self.graph.index.ops_in:
            for around in self.graph.index.around(call):
                if around in inside:
                    inside[around].append(call)
        for layer in layers:
            for call in inside[layer]:
                for number, name in enumerate(refs(self.graph.calls[call].result)):
                    if name in self.graph.tensors:
                        shape = self.graph.tensors[name].shape
                        yield (self._within(call, layer), number, shape), name

    def _layer_of(self, layer_class: int) -> str | None:
        """Return the call of a class's first layer, or None if it is no module."""
        layer = self.layers.layers[self.layers.classes[layer_class].layers[0]].call
        return layer if layer in self.graph.calls else None

    def _within(self, call: str, layer: str) -> Hashable:
        """Return a call's position inside a layer: the layer's class name, and the path in it."""
        around = self.graph.calls[layer]
        return around.class_name, self.graph.calls[call].path.removeprefix(around.path)

    def _strategy(self, choice: Strategy) -> Hashable:
        own = choice.strategy
        return own.letter, tuple(map(self._key_of, (*own.needs, *own.gives)))

    def _gives(self, output: int, choice: Strategy) -> Hashable:
        return self._key_of(choice.strategy.gives[output])

    def _key_of(self, layout: Layout) -> Hashable:
        """Return a key of a layout; the same for I and R, because one of two layers may be frozen.

        A frozen layer has no gradients, so its tensors are I where those of the other are R.
        """
        if layout.kind is LayoutKind.SPLIT:
            return layout.dim, self.axes.names[layout.axis]
        return WHOLE.kind if layout.kind is LayoutKind.REPLICATED else layout.kind


def _made_tensors(nodes: Sequence[LayoutNode]) -> Iterator[tuple[int, int, str]]:
    for number, node in enumerate(nodes):
        for place, out in enumerate(node.op.outputs):
            yield number, place, out


def _together(
    one: tuple[int, _KeyOf], other: tuple[int, _KeyOf], nodes: Sequence[LayoutNode]
) -> Iterator[SameChoices]:
    """Yield the choices of two nodes that go together: those with the same key."""
    groups: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, (number, key_of) in enumerate((one, other)):
        for place, choice in enumerate(nodes[number].choices):
            groups[key_of(choice)][side].append(place)
    for mine, theirs in groups.values():
        if mine and theirs:
            yield SameChoices(first=(one[0], tuple(mine)), second=(other[0], tuple(theirs)))
