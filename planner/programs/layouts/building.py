"""Builds the layout problem of a graph: one layer of each class, priced, with its count.

First comes the frame: the choices, and which conversions are possible. One frame serves several
batches, and both eager and compiled layers; it is then priced for each of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.ops.case import split_of
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import REPLICATED, WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op, TensorOrigin
from autopar.planner.layers import Layers
from autopar.planner.programs.layouts.edges import (
    Conversions,
    LayoutPricer,
    SimilarNodes,
    Structure,
    TensorUse,
    structure_of,
)
from autopar.planner.programs.layouts.problem import (
    ChoiceSource,
    Demand,
    Keep,
    LayoutNode,
    Problem,
    Strategy,
)
from autopar.planner.programs.layouts.program import LayoutVariables
from autopar.planner.programs.layouts.rules import Edge, LayoutRules, permitted, reachable
from autopar.planner.programs.layouts.strategies import strategies

BytesOf = Callable[[str, Layout], int]
_Held = tuple[int, str, tuple[Layout, ...]]  # node, its tensor, the layout in each choice


def keeps_of(
    nodes: Sequence[LayoutNode], pricer: LayoutPricer, memory_bytes: BytesOf
) -> Iterator[Keep]:
    """Yield the tensors that a layer keeps for the backward, each with the ops that keep it.

    Tensors that share memory count once. An op keeps its input in the layout that it needs: after
    a gather, it keeps the gathered copy.
    """
    held: dict[tuple[int, str], list[_Held]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for name in pricer.kept(node.op).names:
            root = pricer.memory.root(name)
            held[node.layer_class, root].append((i, name, _layouts(node, name)))
    for holders in held.values():
        yield _keep(holders, nodes[holders[0][0]].count, memory_bytes)


def _keep(holders: Sequence[_Held], count: int, memory_bytes: BytesOf) -> Keep:
    sizes: dict[str, int] = {}
    for _, name, layouts in holders:
        for layout in layouts:
            sizes.setdefault(_form(layout), memory_bytes(name, layout))
    return Keep(
        holders=tuple(node for node, _, _ in holders),
        forms=tuple(tuple(map(_form, layouts)) for _, _, layouts in holders),
        saved_bytes=sizes,
        count=count,
    )


def _layouts(node: LayoutNode, name: str) -> tuple[Layout, ...]:
    """Return the layout of a tensor, an input or output of the op, in each of the op's choices."""
    if name in node.op.inputs:
        place = node.op.inputs.index(name)
        return tuple(choice.needs[place] for choice in node.choices)
    place = node.op.outputs.index(name)
    return tuple(choice.gives[place] for choice in node.choices)


def _form(layout: Layout) -> str:
    return layout.axis if layout.kind is LayoutKind.SPLIT else ""


# The time of a sum that is done once per step is multiplied by this, so that it is preferred to a
# sum in each microbatch even if a step has only one microbatch.
ONCE_PER_STEP = 0.999

Choices = Mapping[int, Sequence[Strategy]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFrame:
    """A layout problem without prices: all seconds and bytes are 0, and no tensors are kept."""

    structure: Structure
    problem: Problem
    # by the form of the tensors that are kept, which differs if layers are compiled
    _variables: dict[tuple[object, ...], LayoutVariables] = field(default_factory=dict)

    def variables(self, problem: Problem) -> LayoutVariables:
        """Return the variables of a problem with this frame, shared by problems of one form."""
        kept = tuple((one.holders, one.forms, tuple(one.saved_bytes)) for one in problem.keeps)
        if kept not in self._variables:
            self._variables[kept] = LayoutVariables.of(problem)
        return self._variables[kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutInput:
    """A graph with its prices, the ranks of the tensor axis, and the user's rules."""

    graph: Graph
    axes: GraphAxes
    layers: Layers
    pricer: LayoutPricer
    degree: int
    shape: GroupShape
    rules: LayoutRules

    @property
    def batch(self) -> int:
        """The rows of a microbatch."""
        return self.graph.fixed_batch or self.pricer.batch


def frame_of(asked: LayoutInput, structure: Structure | None = None) -> LayoutFrame:
    """Return the frame of a graph's layout problem; its structure is found if not given."""
    own = structure or structure_of(asked.graph, asked.axes, asked.layers)
    return LayoutFrame(structure=own, problem=_Builder(asked, own).problem())


def priced_problem(asked: LayoutInput, frame: LayoutFrame) -> Problem:
    """Return the layout problem of a graph."""
    return _Prices(asked, frame).problem()


class _Builder:
    def __init__(self, asked: LayoutInput, structure: Structure) -> None:
        self.asked, self.graph, self.axes = asked, asked.graph, asked.axes
        self.slots, self.numbering = structure.slots, structure.numbering
        self.needs = structure.needs
        self.conversions = Conversions(asked.graph, asked.axes, batch=asked.batch)
        self.given = _given(asked.graph)
        self.row_axes = asked.axes.of_rows
        self.written = frozenset(b.name for b in asked.graph.buffers if b.updated)
        self.members: dict[str, list[str]] = defaultdict(list)
        for name, slot in self.slots.tensors.items():
            self.members[slot].append(name)

    def problem(self) -> Problem:
        """Return the choices, and the tensors between them."""
        choices = {i: self._choices(op) for i, op in enumerate(self.numbering.ops)}
        layouts = self._slot_layouts(choices)
        edges = {need: self._edge(need, layouts) for need in self.needs}
        left = reachable(choices, [edge for need, edge in edges.items() if not need.leaves])
        nodes = tuple(self._node(i, left[i]) for i in left)
        layouts = self._slot_layouts(left)
        sources = self._sources(layouts)
        places = {key: position for position, key in enumerate(sources)}
        problem = Problem(nodes=nodes, sources=tuple(sources.values()), demands=(), keeps=())
        demands = (self._demand(need, edges[need], places, problem) for need in self.needs)
        similar = SimilarNodes(graph=self.graph, axes=self.axes, layers=self.asked.layers)
        return replace(problem, demands=tuple(demands), alike=tuple(similar.alike(nodes)))

    # --- choices

    def _choices(self, op: Op) -> tuple[Strategy, ...]:
        asked = self.asked
        found = strategies(op, self.graph, self.axes, degree=asked.degree, batch=asked.batch)
        if self.given.issuperset(op.outputs):  # such as a mask: made whole, then cut
            found = (found[0], *(one for one in found[1:] if one.axis in self.row_axes))
        left = permitted(op, found, asked.rules, self.graph, self.axes)
        return tuple(self._choice(s) for s in left if self._is_unambiguous(op, s))

    def _choice(self, strategy: OpLayout) -> Strategy:
        return Strategy(
            strategy=strategy,
            needs=tuple(map(self.slots.common, strategy.needs)),
            gives=tuple(map(self.slots.common, strategy.gives)),
        )

    def _is_unambiguous(self, op: Op, strategy: OpLayout) -> bool:
        """Whether a split is unambiguous: no two axes of a dim have the same common name."""
        pairs = zip((*op.inputs, *op.outputs), (*strategy.needs, *strategy.gives), strict=True)
        return all(
            self.slots.has_distinct_names(name, layout.dim, self.axes)
            for name, layout in pairs
            if layout.kind is LayoutKind.SPLIT
        )

    # --- slots and edges

    def _slot_layouts(self, choices: Choices) -> dict[str, tuple[Layout, ...]]:
        """Return the possible layouts of each slot."""
        wanted: dict[str, dict[Layout, None]] = defaultdict(dict)
        for need in self.needs:
            if need.producer is None:
                for node, place in need.consumers:
                    wanted[need.slot].update(dict.fromkeys(c.needs[place] for c in choices[node]))
            elif need.leaves:
                node, place = need.producer
                wanted[need.slot].update(dict.fromkeys(c.gives[place] for c in choices[node]))
        return {slot: self._possible(slot, own) for slot, own in wanted.items()}

    def _possible(self, slot: str, wanted: Mapping[Layout, None]) -> tuple[Layout, ...]:
        tensors = [self.graph.tensors[name] for name in self.members[slot]]
        outside = [tensor for tensor in tensors if tensor.origin is not TensorOrigin.OP]
        if not outside:
            return tuple(wanted)
        if not all(t.origin is TensorOrigin.PARAMETER or t.name in self.written for t in outside):
            return (WHOLE,)
        is_summed = self.asked.degree > 1 and any(t.requires_grad for t in outside)
        replicated = (REPLICATED,) if is_summed else ()
        return (WHOLE, *replicated, *(x for x in wanted if x.kind is LayoutKind.SPLIT))

    def _edge(self, need: TensorUse, layouts: Mapping[str, tuple[Layout, ...]]) -> Edge:
        tensor, _ = self.needs[need]
        return Edge(
            producer=need.producer,
            layouts=layouts[need.slot] if need.producer is None else None,
            consumers=need.consumers,
            converts=partial(self._allows, tensor),
        )

    def _allows(self, tensor: str, produced: Layout, needed: Layout) -> bool:
        own = [self.slots.own(layout, tensor, self.axes) for layout in (produced, needed)]
        return self.conversions.allow(tensor, own[0], own[1])

    # --- the problem

    def _node(self, number: int, choices: tuple[Strategy, ...]) -> LayoutNode:
        return LayoutNode(
            op=self.numbering.ops[number],
            layer_class=self.numbering.classes[number],
            count=self.numbering.counts[number],
            choices=choices,
        )

    def _sources(
        self, layouts: Mapping[str, tuple[Layout, ...]]
    ) -> dict[tuple[int, int] | str, ChoiceSource]:
        """Return the sources: tensors of ops by (node, output), and slots by name."""
        made: dict[tuple[int, int] | str, ChoiceSource] = {}
        for need, (tensor, _) in self.needs.items():
            if need.producer is not None:
                made.setdefault(need.producer, ChoiceSource(tensor=tensor, producer=need.producer))
        return made | {slot: self._slot_source(slot, own) for slot, own in layouts.items()}

    def _slot_source(self, slot: str, layouts: tuple[Layout, ...]) -> ChoiceSource:
        weights = [
            name
            for name in self.members[slot]
            if self.graph.tensors[name].origin is TensorOrigin.PARAMETER
        ]
        nothing = (0,) * len(layouts)
        return ChoiceSource(
            tensor=weights[0] if weights else slot,
            layouts=layouts,
            seconds=nothing,
            weight_bytes=nothing,
            weights=len(weights),
        )

    def _demand(
        self,
        need: TensorUse,
        edge: Edge,
        places: Mapping[tuple[int, int] | str, int],
        problem: Problem,
    ) -> Demand:
        tensor, count = self.needs[need]
        nodes, sources = problem.nodes, problem.sources
        source = places[need.producer or need.slot]
        crosses = places[need.slot] if need.leaves else -1
        made: set[Layout] = set(sources[source].layouts)
        if need.producer is not None:
            made = {c.gives[need.producer[1]] for c in nodes[need.producer[0]].choices}
        wanted = {c.needs[k] for node, k in need.consumers for c in nodes[node].choices}
        wanted |= set(sources[crosses].layouts) if need.leaves else set()
        possible = (
            (a, b)
            for a in sorted(made, key=str)
            for b in sorted(wanted or {WHOLE}, key=str)
            if edge.reaches(a, b)
        )
        return Demand(
            source=source, tensor=tensor, consumers=need.consumers, crosses=crosses, count=count,
            seconds=dict.fromkeys(possible, 0.0),
        )  # fmt: skip


class _Prices:
    """Prices a frame for one batch and device, eager or compiled."""

    def __init__(self, asked: LayoutInput, frame: LayoutFrame) -> None:
        self.asked, self.graph, self.pricer = asked, asked.graph, asked.pricer
        self.frame, self.slots = frame.problem, frame.structure.slots

    def problem(self) -> Problem:
        """Return the problem with all prices, and the tensors that are kept."""
        nodes = tuple(map(self._node, self.frame.nodes))
        return replace(
            self.frame,
            nodes=nodes,
            sources=tuple(map(self._source, self.frame.sources)),
            demands=tuple(map(self._demand, self.frame.demands)),
            keeps=tuple(keeps_of(nodes, self.pricer, self._memory_bytes)),
        )

    def _node(self, node: LayoutNode) -> LayoutNode:
        kept, priced = self.pricer.kept(node.op), []
        for choice in node.choices:
            split = split_of(choice.strategy, self.asked.degree)
            cost = self.pricer.cost(node.op, split)
            priced.append(
                Strategy(
                    strategy=choice.strategy,
                    needs=choice.needs,
                    gives=choice.gives,
                    seconds=cost.forward_seconds + cost.backward_seconds,
                    saved_bytes=kept.own_bytes(split),
                )
            )
        return replace(node, choices=tuple(priced))

    def _source(self, source: ChoiceSource) -> ChoiceSource:
        if not source.weights:
            return source
        tensor, weights = source.tensor, source.weights
        return replace(
            source,
            seconds=tuple(weights * self._gradient_seconds(tensor, x) for x in source.layouts),
            weight_bytes=tuple(weights * self._bytes(tensor, x) for x in source.layouts),
        )

    def _gradient_seconds(self, tensor: str, layout: Layout) -> float:
        """Return the seconds of summing an R parameter's gradient over ranks, once in a step."""
        if layout != REPLICATED:
            return 0.0
        return self._seconds(tensor, WHOLE, REPLICATED) * ONCE_PER_STEP

    def _demand(self, demand: Demand) -> Demand:
        tensor = demand.tensor
        own = {one: self._own(one, tensor) for ends in demand.seconds for one in ends}
        seconds = {(a, b): self._seconds(tensor, own[a], own[b]) for a, b in demand.seconds}
        return replace(demand, seconds=seconds)

    def _seconds(self, tensor: str, produced: Layout, needed: Layout) -> float:
        """Return the seconds of a conversion, forward and backward together."""
        asked = self.asked
        return sum(
            asked.pricer.conversion_seconds(tensor, produced, needed, asked.degree, asked.shape)
        )

    def _bytes(self, tensor: str, layout: Layout) -> int:
        return self.pricer.tensor_bytes(tensor, self._own(layout, tensor), self.asked.degree)

    def _memory_bytes(self, tensor: str, layout: Layout) -> int:
        return self.pricer.memory_bytes(tensor, self._own(layout, tensor), self.asked.degree)

    def _own(self, layout: Layout, tensor: str) -> Layout:
        return self.slots.own(layout, tensor, self.asked.axes)


def _given(graph: Graph) -> frozenset[str]:
    """Return the tensors that depend only on inputs, constants and buffers."""
    outside = (TensorOrigin.INPUT, TensorOrigin.CONSTANT, TensorOrigin.BUFFER)
    given = {tensor.name for tensor in graph.tensors.values() if tensor.origin in outside}
    for op in graph.ops:
        if given.issuperset(op.inputs):
            given.update(op.outputs)
    return frozenset(given)
