"""The nodes of a layout problem, which of them are split alike, and conversions between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.ops.case import OpSplit
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import CONVERSIONS, WHOLE, Layout, LayoutKind
from autopar.planner.graph.ops import Op, TensorOrigin, refs
from autopar.planner.layers import Layer, Layers
from autopar.planner.programs.layouts.problem import LayoutNode, SameChoices, Strategy
from autopar.planner.programs.layouts.rules import Slots, find_slots
from autopar.planner.programs.layouts.strategies import is_contiguous, is_cuttable


class SecondsOf(Protocol):
    """The seconds of one op on one rank."""

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward."""

    @property
    def backward_seconds(self) -> float:
        """Seconds of the backward, including gradients of weights."""


class KeptOfOp(Protocol):
    """What an op saves for the backward."""

    @property
    def names(self) -> tuple[str, ...]:
        """The operands and results that the op saves."""

    def own_bytes(self, split: OpSplit | None) -> int:
        """Return the bytes of the saved masks and statistics, which are no tensors of the graph."""


class MemoryOf(Protocol):
    """Knows which tensor owns the memory of another."""

    def root(self, name: str) -> str:
        """Return the tensor that owns this tensor's memory."""


class LayoutPricer(Protocol):
    """Prices a graph at one batch size, on one device."""

    @property
    def batch(self) -> int:
        """The rows of a microbatch."""

    @property
    def memory(self) -> MemoryOf:
        """Which tensor owns the memory of each tensor."""

    def cost(self, op: Op, split: OpSplit | None) -> SecondsOf:
        """Return the seconds of an op, whole or split."""

    def kept(self, op: Op) -> KeptOfOp:
        """Return what an op saves for the backward."""

    def tensor_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes of a tensor on one rank."""

    def memory_bytes(self, name: str, layout: Layout, degree: int) -> int:
        """Return the bytes on one rank of the memory that a tensor lies in."""

    def conversion_seconds(
        self, tensor: str, produced: Layout, needed: Layout, degree: int, shape: GroupShape
    ) -> tuple[float, float]:
        """Return the seconds of a conversion, forward and backward."""


Ends = tuple[tuple[int, int], ...]  # (node, input) of each consumer


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorUse:
    """How the ops of one layer use a tensor; a node is the number of an op (see Numbering).

    `consumers` are (node, input). `producer` is (node, output), or None if no op of this layer
    makes the tensor: it comes in the layout of its slot, a set of tensors that have one layout.
    `leaves` means that other layers need it, too. Without consumers and `leaves`, the tensor is the
    loss.
    """

    slot: str
    producer: tuple[int, int] | None
    consumers: Ends
    leaves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """The nodes: an op of a class's first layer stands for the equal ops of the other layers."""

    ops: tuple[Op, ...]
    classes: tuple[int, ...]  # the class of each node
    counts: tuple[int, ...]  # the number of layers of this class
    first: tuple[int, ...]  # the first node of each class


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The structure of a layout problem, independent of degree and batch."""

    slots: Slots
    numbering: Numbering
    # each use with its tensor, and the number of layers that have it
    needs: Mapping[TensorUse, tuple[str, int]]


def structure_of(graph: Graph, axes: GraphAxes, layers: Layers) -> Structure:
    """Return the structure of a graph."""
    slots, numbering = find_slots(graph, axes, layers), number_nodes(layers)
    needs = count_needs(graph, layers, slots, numbering)
    return Structure(slots=slots, numbering=numbering, needs=needs)


def number_nodes(layers: Layers) -> Numbering:
    """Return the nodes of all layer classes."""
    ops: list[Op] = []
    classes: list[int] = []
    counts: list[int] = []
    first: list[int] = []
    for number, layer_class in enumerate(layers.classes):
        own = layers.layers[layer_class.layers[0]].ops
        first.append(len(ops))
        ops += own
        classes += [number] * len(own)
        counts += [len(layer_class.layers)] * len(own)
    return Numbering(
        ops=tuple(ops), classes=tuple(classes), counts=tuple(counts), first=tuple(first)
    )


def crossing_tensors(layers: Layers) -> frozenset[str]:
    """Return the tensors that one layer makes and another needs."""
    maker = {
        out: i for i, layer in enumerate(layers.layers) for op in layer.ops for out in op.outputs
    }
    return frozenset(
        name
        for i, layer in enumerate(layers.layers)
        for op in layer.ops
        for name in op.inputs
        if maker.get(name, i) != i
    )


def count_needs(
    graph: Graph, layers: Layers, slots: Slots, nodes: Numbering
) -> Mapping[TensorUse, tuple[str, int]]:
    """Map each use to the first tensor that is used so, and the number of layers with this use."""
    crossing = crossing_tensors(layers)
    counts: Counter[TensorUse] = Counter()
    tensors: dict[TensorUse, str] = {}
    for layer in layers.layers:
        for need, name in _needs_of(layer, nodes.first[layer.layer_class], slots, crossing, graph):
            counts[need] += 1
            tensors.setdefault(need, name)
    return {need: (tensors[need], count) for need, count in counts.items()}


def _needs_of(
    layer: Layer, first: int, slots: Slots, crossing: frozenset[str], graph: Graph
) -> list[tuple[TensorUse, str]]:
    makers: dict[str, tuple[int, int]] = {}
    consumers: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, op in enumerate(layer.ops, start=first):
        makers.update({name: (i, k) for k, name in enumerate(op.outputs)})
        for k, name in enumerate(op.inputs):
            consumers[name].append((i, k))
    found = [
        (
            TensorUse(
                slot=slots.tensors[name],
                producer=makers.get(name),
                consumers=tuple(consumers.get(name, ())),
                leaves=name in crossing and name in makers,
            ),
            name,
        )
        for name in dict.fromkeys((*makers, *consumers))
        if name in consumers or name in crossing
    ]
    if graph.loss in makers:
        loss = TensorUse(
            slot=slots.tensors[graph.loss], producer=makers[graph.loss], consumers=(), leaves=False
        )
        found.append((loss, graph.loss))
    return found


class Conversions:
    """The conversions of a graph's tensors, at one batch size.

    A computed tensor is cut into shards, or gathered, only if a shard is one block of the dim (of
    each part of a concatenated dim). A parameter is cut into shards before the training: they may
    have any form, and are never gathered. Three things are never converted: a buffer that
    the model writes to; memory that is written under one name and later read under an older one,
    because the write would miss the copy that a conversion makes; and memory that is read by
    strides.
    """

    def __init__(self, graph: Graph, axes: GraphAxes, *, batch: int) -> None:
        self._graph, self._axes, self._batch = graph, axes, batch
        self._written = frozenset(buffer.name for buffer in graph.buffers if buffer.updated)
        self._fixed = _written_and_read(graph) | _strided(graph)

    def allow(self, tensor: str, produced: Layout, needed: Layout) -> bool:
        """Whether a tensor's layout can be converted to another, or is equal to it."""
        if produced == needed:
            return True
        if (produced.kind, needed.kind) not in CONVERSIONS:
            return False
        if self._graph.tensors[tensor].storage in self._fixed:
            return False
        if self._graph.tensors[tensor].origin in (TensorOrigin.PARAMETER, TensorOrigin.BUFFER):
            if produced.kind is LayoutKind.SPLIT or tensor in self._written:
                return False
            return needed.kind is not LayoutKind.SPLIT or self._is_cuttable(tensor, needed)
        if produced.kind is needed.kind is LayoutKind.SPLIT and produced.dim == needed.dim:
            return False  # an all-to-all cuts one dim and gathers another
        return all(self._is_contiguous(tensor, layout) for layout in (produced, needed))

    def _is_cuttable(self, tensor: str, layout: Layout) -> bool:
        return is_cuttable(self._axes.dims[tensor][layout.dim], layout.axis)

    def _is_contiguous(self, tensor: str, layout: Layout) -> bool:
        if layout.kind is not LayoutKind.SPLIT:
            return True
        return is_contiguous(self._axes.dims[tensor][layout.dim], layout.axis, self._batch)


def _written_and_read(graph: Graph) -> frozenset[str]:
    """Return the storages that an op writes to, and a later op reads through an older tensor."""
    index = graph.index
    return frozenset(
        storage
        for storage, writers in index.writers.items()
        for name in index.lying_in[storage]
        for at in (index.places[op.name] for op in writers)
        if index.made_at(name) < at < index.last_read_at(name)
    )


def _strided(graph: Graph) -> frozenset[str]:
    """Return the storages that an op reads by strides."""
    return frozenset(
        graph.tensors[op.inputs[0]].storage
        for op in graph.ops
        if op.target.startswith("aten.as_strided")
    )


_KeyOf = Callable[[Strategy], Hashable]  # choices with equal keys go together
_KeyedNodes = list[tuple[int, _KeyOf]]  # each with the key of its choices


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarNodes:
    """Finds nodes at equal positions of layer classes, and the choices that split them alike.

    Layers of different classes may share most of their code. For example, only some layers have
    adapters, the layers before the first adapter have no gradients, or the first layers of a
    mixture of experts are dense. A script prints shared code only once, if the ops in it are split
    alike.
    """

    graph: Graph
    axes: GraphAxes
    layers: Layers

    def alike(self, nodes: Sequence[LayoutNode]) -> Iterator[SameChoices]:
        """Yield pairs of nodes of several layer classes, with their choices that go together."""
        places: dict[Hashable, _KeyedNodes] = defaultdict(list)
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
