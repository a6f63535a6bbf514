"""Joins a plan's graph with the layouts of its ops and tensors, for printing forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from autopar.codegen.forward.reading.modules import Modules
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout, ParameterLayout
from autopar.planner.graph.ops import (
    BATCH,
    ONE,
    Extent,
    FunctionCall,
    ModuleCall,
    Op,
    Ref,
    Value,
)
from autopar.planner.layers import Layers
from autopar.planner.plan.again import GraphParts, graph_parts, parts_of
from autopar.planner.plan.plan import Plan
from autopar.planner.programs.layouts.opened import is_split
from autopar.planner.programs.layouts.rules import find_slots, own_layouts
from autopar.planner.rules.signature import Concat, Dim, Leaf, leaves, size_of, substituted

Part = tuple[Extent, Extent]  # number of units, size of a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How a dim is cut: the parts in `listed`, repeated `times`."""

    listed: tuple[Part, ...]
    times: Extent

    def may_be_omitted(self, degree: int, batch: int, *, is_whole: bool) -> bool:
        """Whether the runtime can infer the cut.

        It can if a single part is cut evenly, or if its units are single elements and the runtime
        has the whole dim (`is_whole`).
        """
        if self.times != ONE or len(self.listed) != 1:
            return False
        return self.are_even(degree, batch) or (is_whole and self.listed[0][1] == ONE)

    def are_even(self, degree: int, batch: int) -> bool:
        """Whether every rank gets the same number of units of each part."""
        return all(count.at(batch) % degree == 0 for count, _ in self.listed)


def parts_of_dim(dim: Dim, axis: str) -> Parts:
    """Return the parts of a dim that is split along an axis."""
    if isinstance(dim, Leaf):
        assert dim.name == axis, f"{axis} does not occur in every part of the dim"
        return Parts(listed=((dim.size, ONE),), times=ONE)
    if isinstance(dim, Concat):
        every = [parts_of_dim(part, axis) for part in dim.parts]
        listed = tuple(part for inner in every for part in inner.listed * inner.times.at(0))
        return Parts(listed=listed, times=ONE)
    place = next(
        i for i, factor in enumerate(dim.factors) if any(x.name == axis for x in leaves(factor))
    )
    own, times, inside = parts_of_dim(dim.factors[place], axis), ONE, ONE
    for factor in dim.factors[:place]:
        times = times * size_of(factor)
    for factor in dim.factors[place + 1 :]:
        inside = inside * size_of(factor)
    listed = tuple((count, unit * inside) for count, unit in own.listed)
    return Parts(listed=listed, times=own.times * times)


class Lengths:
    """A graph's sizes for rows of other lengths, from a second trace (made on first use).

    If the model takes no other lengths, these are the graph's own sizes.
    """

    def __init__(self, graph: Graph, axes: GraphAxes, find: Callable[[], Graph | None]) -> None:
        self._graph, self._axes, self._find = graph, axes, find

    @cached_property
    def _other(self) -> Graph:
        return self._find() or self._graph

    @cached_property
    def _axis_sizes(self) -> Mapping[str, Extent]:
        return {
            dim.name: size
            for name in self._graph.tensors
            for dim, size in zip(self._axes.dims[name], self.shape(name), strict=True)
            if isinstance(dim, Leaf)
        }

    @property
    def are_known(self) -> bool:
        """Whether the model accepts other lengths."""
        return self._other is not self._graph

    def shape(self, tensor: str) -> tuple[Extent, ...]:
        """Return a tensor's shape at other lengths."""
        return self._other.tensors.get(tensor, self._graph.tensors[tensor]).shape

    def argument(self, op: Op, name: str) -> Value:
        """Return an op's argument at other lengths."""
        place = self._other.index.places.get(op.name)
        return (op if place is None else self._other.ops[place]).argument(name)

    def call(self, unit: str) -> ModuleCall | None:
        """Return a module call at other lengths."""
        return self._other.calls.get(unit)

    def function(self, call: FunctionCall) -> FunctionCall:
        """Return a function call at other lengths."""
        pairs = zip(self._graph.functions, self._other.functions, strict=False)
        other = next((two for one, two in pairs if one is call), call)
        return other if _form(other) == _form(call) else call

    def dim(self, dim: Dim) -> Dim:
        """Return a dim with its size at other lengths."""
        sizes = self._axis_sizes if self.are_known else {}
        return substituted(dim, lambda leaf: Leaf(leaf.name, sizes.get(leaf.name, leaf.size)))


def _form(call: FunctionCall) -> Value:
    """Return a key of a call, equal at all lengths: its function, and which values are tensors."""
    names, values = tuple(zip(*call.keywords, strict=True)) or ((), ())
    return call.module, call.name, names, _nest(call.arguments), _nest(values)


def _nest(value: Value) -> Value:
    return tuple(map(_nest, value)) if isinstance(value, tuple) else isinstance(value, Ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitGraph:
    """A graph with its tensors' layouts on a tensor axis of `degree` ranks.

    `crossing` has the layouts in which tensors go to other layers; the rest go as they are made.
    `weighed` are the ops that make the terms of the loss; a microbatch multiplies each by a weight,
    and the weights have this order. `own_rows` are inputs of which a rank gets only its rows.
    `lengths` has the sizes at other lengths. With `has_metrics`, evaluations need the model's
    outputs.
    """

    graph: Graph
    axes: GraphAxes
    layers: Layers
    modules: Modules
    degree: int
    batch: int  # rows of a microbatch
    ops: Mapping[str, OpLayout]
    gives: Mapping[str, Layout]
    crossing: Mapping[str, Layout]
    layer_of: Mapping[str, int]  # of an op, and of a tensor that an op makes
    row_axes: frozenset[str]  # the axes whose sizes depend on the batch
    lengths: Lengths
    weighed: tuple[str, ...] = ()
    own_rows: tuple[str, ...] = ()
    has_metrics: bool = False

    def need(self, op: Op, position: int) -> Layout:
        """Return the layout in which an op needs its input at a position."""
        return self.ops[op.name].needs[position] if op.name in self.ops else WHOLE

    def made(self, tensor: str) -> Layout:
        """Return the layout in which an op makes a tensor, or in which ranks store a parameter."""
        return self.gives.get(tensor, WHOLE)

    def layouts_of(self, op: Op, position: int) -> tuple[Layout, ...]:
        """Return an input's layouts in turn: as made, as passed between layers, as needed."""
        tensor = op.inputs[position]
        steps = [self.made(tensor)]
        if tensor in self.crossing and self.layer_of[tensor] != self.layer_of[op.name]:
            steps.append(self.crossing[tensor])
        steps.append(self.need(op, position))
        return tuple(layout for i, layout in enumerate(steps) if i == 0 or layout != steps[i - 1])

    def is_of_rows(self, layout: Layout) -> bool:
        """Whether a layout is split along the batch's rows, whose number varies."""
        return is_split(layout) and layout.axis in self.row_axes

    def axis_name(self, layout: Layout) -> str:
        """Return the name of the axis that a layout is split along."""
        return self.axes.names.get(layout.axis, layout.axis)

    def split_axis_name(self, op: Op) -> str:
        """Return the name of the axis that an op is split along, or ""."""
        layout = self.ops.get(op.name)
        return self.axes.names.get(layout.axis, layout.axis) if layout is not None else ""


def with_own_rows(split: SplitGraph) -> SplitGraph:
    """Return a split in which a rank gets only those rows of the inputs that it uses."""
    if split.batch < split.degree:  # some ranks would have none
        return split
    own = {name: layout for name in split.graph.inputs if (layout := _share(name, split))}
    return replace(split, own_rows=tuple(own), gives=MappingProxyType({**split.gives, **own}))


def _share(name: str, split: SplitGraph) -> Layout | None:
    """Return the layout in which all readers need an input, if each rank needs only its rows."""
    shape = split.graph.tensors[name].shape
    if not shape or shape[0] != BATCH:
        return None
    wanted = {
        split.need(op, position)
        for op in split.graph.ops
        for position, tensor in enumerate(op.inputs)
        if tensor == name
    }
    layout = wanted.pop() if len(wanted) == 1 else WHOLE
    return layout if layout.dim == 0 and split.is_of_rows(layout) else None


def split_of(
    plan: Plan,
    modules: Modules,
    other: Callable[[], Graph | None] = lambda: None,
    parts: GraphParts | None = None,
) -> SplitGraph:
    """Return a plan's graph with the layouts of its ops and tensors, after checking them.

    `other` returns the graph for inputs of other lengths. `parts` are the axes and layers of the
    plan's graph, if they are known.
    """
    return split_graph(
        plan.graph,
        modules,
        parts=parts_of(plan, where="the plan", known=parts),
        degree=plan.arrangement.tensor,
        batch=plan.arrangement.microbatch,
        layouts=plan.layouts,
        outside=(*plan.parameters, *plan.crossing),
        other=other,
    )


def split_graph(
    graph: Graph,
    modules: Modules,
    *,
    parts: GraphParts | None = None,
    degree: int = 1,
    batch: int = 1,
    layouts: Sequence[Sequence[OpLayout]] = (),
    outside: Sequence[ParameterLayout] = (),
    other: Callable[[], Graph | None] = lambda: None,
) -> SplitGraph:
    """Return a graph with layouts; `layouts` has those of the ops of each layer class.

    `outside` has the layouts of parameters and of tensors that cross between layers.
    """
    axes, layers = parts if parts is not None else graph_parts(graph)
    ops = _op_layouts(graph, axes, layers, layouts) if degree > 1 else {}
    gives = {t: g for op in graph.ops if op.name in ops for t, g in _results(op, ops[op.name])}
    given = {p.name: _plain(p.layout, p.name, graph) for p in outside if p.name in graph.tensors}
    made = graph.index.made_by.keys()
    if degree > 1:
        gives |= {name: layout for name, layout in given.items() if name not in made}
    return SplitGraph(
        graph=graph,
        axes=axes,
        layers=layers,
        modules=modules,
        degree=degree,
        batch=batch,
        ops=MappingProxyType(ops),
        gives=MappingProxyType(gives),
        crossing=MappingProxyType({n: x for n, x in given.items() if degree > 1 and n in made}),
        layer_of=MappingProxyType(dict(_places(layers))),
        row_axes=axes.of_rows,
        lengths=Lengths(graph, axes, other),
    )


def _op_layouts(
    graph: Graph, axes: GraphAxes, layers: Layers, layouts: Sequence[Sequence[OpLayout]]
) -> dict[str, OpLayout]:
    fits = len(layouts) == len(layers.classes) and all(
        len(given) == len(layers.layers[kind.layers[0]].ops)
        for given, kind in zip(layouts, layers.classes, strict=True)
    )
    if not fits:
        raise InputError(
            f"the plan has layouts for {len(layouts)} kinds of layers",
            expected=f"layouts for each op of the model's {len(layers.classes)} kinds",
            fix="plan again: the model has changed",
        )
    slots, chosen = find_slots(graph, axes, layers), tuple(map(tuple, layouts))
    found: dict[str, OpLayout] = {}
    for layer in layers.layers:
        for op, layout in zip(layer.ops, own_layouts(chosen, layer, axes, slots), strict=True):
            needs = tuple(_plain(x, n, graph) for x, n in zip(layout.needs, op.inputs, strict=True))
            gives = tuple(_plain(x, n, graph) for n, x in _results(op, layout))
            found[op.name] = replace(layout, needs=needs, gives=gives)
    return found


def _results(op: Op, layout: OpLayout) -> list[tuple[str, Layout]]:
    return list(zip(op.outputs, layout.gives, strict=True))


def _places(layers: Layers) -> Iterator[tuple[str, int]]:
    for number, layer in enumerate(layers.layers):
        for op in layer.ops:
            yield op.name, number
            for name in op.outputs:
                yield name, number


def _plain(layout: Layout, tensor: str, graph: Graph) -> Layout:
    """Return I for R if the tensor needs no gradient: without gradients the two are the same."""
    if layout.kind is LayoutKind.REPLICATED and not graph.tensors[tensor].requires_grad:
        return WHOLE
    return layout
