"""Reads from a plan how tensors lie on the tensor axis, where they are made and where used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.codegen.forward.reading.lengths import Lengths
from autopar.codegen.forward.reading.modules import Modules
from autopar.planner.axes.infer import Axes, infer_axes
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.layouts import WHOLE, Kind, Layout, OpLayout, ParameterLayout
from autopar.planner.ops import Op
from autopar.planner.plan.parts import parts_of
from autopar.planner.plan.plan import Plan
from autopar.planner.programs.layouts.slots import find_slots, own_layouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A graph with the layouts of its tensors on a tensor axis of `degree` ranks.

    `crossing` holds the layouts in which tensors pass from one layer to others, where that is not
    how they are made. `weighed` are ops that are terms of the loss: each is multiplied by a weight
    of the microbatch, in this order. `own_rows` are inputs of which a rank is given its rows alone.
    `lengths` tells which sizes follow those of the inputs. With `has_metrics`, evaluations want the
    outputs of the model.
    """

    graph: Graph
    axes: Axes
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
        """Return the layout that an op needs of its input at a position."""
        return self.ops[op.name].needs[position] if op.name in self.ops else WHOLE

    def made(self, tensor: str) -> Layout:
        """Return the layout of a tensor as it is made, or held if it is a parameter."""
        return self.gives.get(tensor, WHOLE)

    def way(self, op: Op, position: int) -> tuple[Layout, ...]:
        """Return the layouts that an input goes through, from how it is made to what is needed."""
        tensor = op.inputs[position]
        steps = [self.made(tensor)]
        if tensor in self.crossing and self.layer_of[tensor] != self.layer_of[op.name]:
            steps.append(self.crossing[tensor])
        steps.append(self.need(op, position))
        return tuple(layout for i, layout in enumerate(steps) if i == 0 or layout != steps[i - 1])

    def axis_name(self, layout: Layout) -> str:
        """Return what people call the axis that a layout is split along."""
        return self.axes.names.get(layout.axis, layout.axis)

    def split_axis_name(self, op: Op) -> str:
        """Return what people call the axis that an op is split along, "" where it is not."""
        layout = self.ops.get(op.name)
        return self.axes.names.get(layout.axis, layout.axis) if layout is not None else ""


def split_of(
    plan: Plan, modules: Modules, other: Callable[[], Graph | None] = lambda: None
) -> Split:
    """Return the layouts of a plan, for each op and tensor of its graph, once they fit it.

    `other` gives the graph where the inputs have other lengths.
    """
    return split_graph(
        plan.graph,
        modules,
        parts=parts_of(plan, where="the plan"),
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
    parts: tuple[Axes, Layers] | None = None,
    degree: int = 1,
    batch: int = 1,
    layouts: Sequence[Sequence[OpLayout]] = (),
    outside: Sequence[ParameterLayout] = (),
    other: Callable[[], Graph | None] = lambda: None,
) -> Split:
    """Return a graph with layouts per layer class; `outside` are parameters and what crosses."""
    axes, layers = parts if parts is not None else _found(graph)
    ops = _op_layouts(graph, axes, layers, layouts) if degree > 1 else {}
    gives = {t: g for op in graph.ops if op.name in ops for t, g in _results(op, ops[op.name])}
    given = {p.name: _plain(p.layout, p.name, graph) for p in outside if p.name in graph.tensors}
    is_made = graph.index.made_by.keys()
    if degree > 1:
        gives |= {name: layout for name, layout in given.items() if name not in is_made}
    return Split(
        graph=graph,
        axes=axes,
        layers=layers,
        modules=modules,
        degree=degree,
        batch=batch,
        ops=MappingProxyType(ops),
        gives=MappingProxyType(gives),
        crossing=MappingProxyType({n: x for n, x in given.items() if degree > 1 and n in is_made}),
        layer_of=MappingProxyType(dict(_places(layers))),
        row_axes=axes.of_rows(),
        lengths=Lengths(graph, axes, other),
    )


def _found(graph: Graph) -> tuple[Axes, Layers]:
    axes = infer_axes(graph)
    return axes, find_layers(graph, axes)


def _op_layouts(
    graph: Graph, axes: Axes, layers: Layers, layouts: Sequence[Sequence[OpLayout]]
) -> dict[str, OpLayout]:
    fits = len(layouts) == len(layers.classes) and all(
        len(given) == len(layers.layers[kind.layers[0]].ops)
        for given, kind in zip(layouts, layers.classes, strict=True)
    )
    if not fits:
        raise InputError(
            f"the plan has layouts for {len(layouts)} kinds of layers",
            expected=f"those of the {len(layers.classes)} kinds that the model has",
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
    """Return I for R where no gradient flows: there the two are the same."""
    if layout.kind is Kind.REPLICATED and not graph.tensors[tensor].requires_grad:
        return WHOLE
    return layout
