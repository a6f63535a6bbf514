"""Solves layouts, checks them against the table of conversions, and says how tensors are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.errors import gathered
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout, ParameterLayout
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layers
from autopar.planner.programs.layouts.building import LayoutInput
from autopar.planner.programs.layouts.choice import (
    MOST_NODES,
    Budget,
    LayoutProgram,
    LayoutSolution,
)
from autopar.planner.programs.layouts.edges import Conversions, LayoutPricer, crossing_tensors
from autopar.planner.programs.layouts.rules import (
    FREE,
    LayoutRules,
    Slots,
    find_slots,
    own_layouts,
)
from autopar.planner.programs.layouts.strategies import Parts, parts_of, strategies
from autopar.planner.programs.solver import SolverName

_WHOLE_FRONT = Budget()


def solve_layouts(
    graph: Graph,
    axes: GraphAxes,
    layers: Layers,
    pricer: LayoutPricer,
    *,
    degree: int,
    shape: GroupShape,
    rules: LayoutRules = FREE,
    budget: Budget = _WHOLE_FRONT,
    most_nodes: int = MOST_NODES,
    solver: SolverName | None = None,
) -> tuple[LayoutSolution, ...]:
    """Return the Pareto-optimal layouts, the fastest first."""
    place = LayoutInput(
        graph=graph, axes=axes, layers=layers, pricer=pricer, degree=degree, shape=shape,
        rules=rules,
    )  # fmt: skip
    return LayoutProgram(place, budget, most_nodes=most_nodes, solver=solver).front()


def parameter_parts(
    axes: GraphAxes, name: str, layout: Layout, *, batch: int = 1
) -> tuple[int, Parts]:
    """Return the dim in which a split tensor is cut, and how: parts of (blocks, block size).

    The batch matters to activations alone.
    """
    assert layout.kind is LayoutKind.SPLIT, f"{name} is not split"
    return layout.dim, parts_of(axes.dims[name][layout.dim], layout.axis, batch)


def check(
    graph: Graph,
    axes: GraphAxes,
    layers: Layers,
    *,
    layouts: Sequence[Sequence[OpLayout]],
    parameters: Sequence[ParameterLayout],
    crossing: Sequence[ParameterLayout],
    degree: int,
    batch: int,
) -> None:
    """Raise InputError unless every op has one of its strategies and every edge a conversion."""
    outside = {own.name: own.layout for own in (*parameters, *crossing)}
    faults = [*_shape_faults(layers, layouts), *_missing(layers, outside)]
    if not faults:
        checker = _Checker(graph, axes, layers, outside, degree=degree, batch=batch)
        faults = list(checker.faults(tuple(map(tuple, layouts))))
    if faults:
        raise gathered(faults[:10], where="the layouts of the plan", fix="Make the plan again.")


def _shape_faults(layers: Layers, layouts: Sequence[Sequence[OpLayout]]) -> Iterator[str]:
    if len(layouts) != len(layers.classes):
        yield f"There are {len(layers.classes)} kinds of layers, and layouts for {len(layouts)}."
        return
    for layer_class, own in zip(layers.classes, layouts, strict=True):
        ops = layers.layers[layer_class.layers[0]].ops
        if len(ops) != len(own):
            yield f"{layer_class.name} has {len(ops)} ops, and layouts for {len(own)}."


def _missing(layers: Layers, outside: Mapping[str, Layout]) -> Iterator[str]:
    for name in sorted(crossing_tensors(layers) - outside.keys()):
        yield f"{name} crosses layers in no layout."


class _Checker:
    def __init__(
        self,
        graph: Graph,
        axes: GraphAxes,
        layers: Layers,
        outside: Mapping[str, Layout],
        *,
        degree: int,
        batch: int,
    ) -> None:
        self.graph, self.axes, self.layers, self.outside = graph, axes, layers, outside
        self.degree, self.batch = degree, batch
        self.slots: Slots = find_slots(graph, axes, layers)
        self.conversions = Conversions(graph, axes, batch=batch)

    def faults(self, layouts: tuple[tuple[OpLayout, ...], ...]) -> Iterator[str]:
        """Yield what is wrong, layer by layer."""
        for layer in self.layers.layers:
            own = own_layouts(layouts, layer, self.axes, self.slots)
            produced: dict[str, Layout] = {}
            for op, strategy in zip(layer.ops, own, strict=True):
                yield from self._op_faults(op, strategy)
                for name, need in zip(op.inputs, strategy.needs, strict=True):
                    before = produced.get(name) or self.outside.get(name, WHOLE)
                    yield from self._edge_faults(name, before, need, op.name)
                produced |= dict(zip(op.outputs, strategy.gives, strict=True))
            for name in produced.keys() & self.outside.keys():
                yield from self._edge_faults(
                    name, produced[name], self.outside[name], "the next layers"
                )
            if self.graph.loss in produced:
                yield from self._edge_faults(
                    self.graph.loss, produced[self.graph.loss], WHOLE, "the loss"
                )

    def _op_faults(self, op: Op, strategy: OpLayout) -> Iterator[str]:
        known = strategies(op, self.graph, self.axes, degree=self.degree, batch=self.batch)
        if not any((s.needs, s.gives) == (strategy.needs, strategy.gives) for s in known):
            needs, gives = " ".join(map(str, strategy.needs)), " ".join(map(str, strategy.gives))
            yield f"{op.name} ({op.target}) cannot run as {needs} → {gives}."

    def _edge_faults(self, tensor: str, before: Layout, need: Layout, user: str) -> Iterator[str]:
        if not self.conversions.allow(tensor, before, need):
            yield f"{tensor} is {before}, and {user} needs {need}: there is no conversion."
