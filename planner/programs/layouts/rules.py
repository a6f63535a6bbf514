"""The user's rules for layouts, and tensors that must have equal layouts.

Finds slots: sets of tensors that must have one layout, and of axes that must be split alike. Layers
of one class are solved once, so the tensors at one position of its layers have one layout. The
output of one block is the input of the next, and inputs of equal blocks share a position: so a
block's input and its output get one layout, too. A union-find follows such chains, and also unites
tied and shared parameters.

Rules forbid axes by name, and ban or pin them in modules. Layers of one class are split alike, so a
rule must match all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.errors import InfeasibleError, InputError
from autopar.planner.graph.graph import Graph, once_per_graph, united
from autopar.planner.graph.layouts import WHOLE, Layout, LayoutKind, OpLayout
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layer, Layers
from autopar.planner.programs.layouts.problem import Strategy
from autopar.planner.rules.rule import Traffic
from autopar.planner.rules.signature import FlattenedDims, leaves
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Every tensor's slot, and the common name of every axis.

    A slot is named after one of its tensors, a common name is that of one of the axes.
    """

    tensors: Mapping[str, str]
    axes: Mapping[str, str]

    def common(self, layout: Layout) -> Layout:
        """Return a layout in which the axis has its common name."""
        if layout.kind is not LayoutKind.SPLIT:
            return layout
        return Layout(layout.kind, self.axes[layout.axis], layout.dim)

    def own(self, layout: Layout, tensor: str, axes: GraphAxes) -> Layout:
        """Return a layout in which the axis has its own name in `tensor`, not the common one."""
        if layout.kind is not LayoutKind.SPLIT:
            return layout
        common = self.axes[layout.axis]
        inside = (leaf.name for leaf in leaves(axes.dims[tensor][layout.dim]))
        axis = next(name for name in inside if self.axes[name] == common)
        return layout if axis == layout.axis else Layout(layout.kind, axis, layout.dim)

    def has_distinct_names(self, tensor: str, dim: int, axes: GraphAxes) -> bool:
        """Whether the axes in a dim of a tensor have distinct common names."""
        inside = {leaf.name for leaf in leaves(axes.dims[tensor][dim])}
        return len({self.axes[name] for name in inside}) == len(inside)


@once_per_graph
def find_slots(graph: Graph, axes: GraphAxes, layers: Layers) -> Slots:
    """Return the slots of all tensors and axes of a graph."""
    pairs = tuple(_pairs_at_one_position(layers))
    alike = (
        (a.name, b.name)
        for one, other in pairs
        for mine, theirs in zip(axes.dims[one], axes.dims[other], strict=True)
        for a, b in zip(leaves(mine), leaves(theirs), strict=False)
    )
    return Slots(tensors=united(graph.tensors, pairs), axes=united(axes.names, alike))


def own_layouts(
    layouts: tuple[tuple[OpLayout, ...], ...], layer: Layer, axes: GraphAxes, slots: Slots
) -> tuple[OpLayout, ...]:
    """Return the layouts of a layer's ops, with the axes of its own tensors."""

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


def _pairs_at_one_position(layers: Layers) -> Iterator[tuple[str, str]]:
    """Yield each tensor of a class's first layer with the one at its position in another layer."""
    for layer_class in layers.classes:
        first, *others = (layers.layers[i] for i in layer_class.layers)
        for other in others:
            for mine, theirs in zip(first.ops, other.ops, strict=True):
                yield from zip(mine.inputs, theirs.inputs, strict=True)
                yield from zip(mine.outputs, theirs.outputs, strict=True)


Converts = Callable[[Layout, Layout], bool]


@dataclass(slots=True, kw_only=True)
class Edge:
    """A tensor that ops of one layer need.

    Either `producer` is the op of the layer that makes it, as (number of the op, place among its
    outputs), or it comes in with one of its slot's `layouts`. `consumers` are the ops that need it,
    as (number of the op, place among its inputs). For `reachable`, a tensor without consumers is
    the loss.
    """

    producer: tuple[int, int] | None
    layouts: tuple[Layout, ...] | None
    consumers: tuple[tuple[int, int], ...]
    converts: Converts
    known: dict[tuple[Layout, Layout], bool] = field(default_factory=dict)  # past answers

    def reaches(self, produced: Layout, needed: Layout) -> bool:
        """Whether one layout can be converted to the other."""
        pair = (produced, needed)
        if pair not in self.known:
            self.known[pair] = self.converts(produced, needed)
        return self.known[pair]


def reachable(
    choices: Mapping[int, Sequence[Strategy]], edges: Sequence[Edge]
) -> dict[int, tuple[Strategy, ...]]:
    """Return the choices for which every edge of their op has a matching choice at its other end.

    No solution is lost: a dropped choice cannot be combined with any choice at that end.
    """
    left = {node: tuple(own) for node, own in choices.items()}
    changed = True
    while changed:
        changed = False
        for edge in edges:
            for node, kept in _narrowed(edge, left):
                if len(kept) < len(left[node]):
                    left[node], changed = kept, True
    return left


def _narrowed(
    edge: Edge, left: Mapping[int, tuple[Strategy, ...]]
) -> list[tuple[int, tuple[Strategy, ...]]]:
    found = []
    made = _made(edge, left)
    wanted = [{c.needs[place] for c in left[node]} for node, place in edge.consumers] or [{WHOLE}]
    if edge.producer is not None:
        node, place = edge.producer
        usable = {
            m for m in made if all(any(edge.reaches(m, need) for need in own) for own in wanted)
        }
        found.append((node, tuple(c for c in left[node] if c.gives[place] in usable)))
    having = {need for own in wanted for need in own if any(edge.reaches(m, need) for m in made)}
    found += [
        (node, tuple(c for c in left[node] if c.needs[place] in having))
        for node, place in edge.consumers
    ]
    return found


def _made(edge: Edge, left: Mapping[int, tuple[Strategy, ...]]) -> set[Layout]:
    if edge.producer is None:
        return set(edge.layouts or ())
    node, place = edge.producer
    return {choice.gives[place] for choice in left[node]}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPin:
    """The ops of these modules (`h.*.mlp`) are split along this axis if possible.

    With the axis "", they are not split at all.
    """

    modules: str
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """The ops of these modules are never split along this axis."""

    modules: str
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """Rules for axes by name (seq, heads, ffn), and for modules by path."""

    forbidden: tuple[str, ...] = ()
    pins: tuple[LayoutPin, ...] = ()
    bans: tuple[Ban, ...] = ()


FREE = LayoutRules()


def permitted(
    op: Op, found: Sequence[OpLayout], rules: LayoutRules, graph: Graph, axes: GraphAxes
) -> tuple[OpLayout, ...]:
    """Return the strategies of an op that the rules allow.

    Bans and forbidden axes exclude splits alone: an op may stay unsplit. A pin leaves only
    strategies along its axis. An op without such a strategy stays free, and so does a view with the
    axis as an inner factor of a flattened dim: there the shards would interleave, and no conversion
    joins such shards.
    """
    banned = {ban.axis for ban in rules.bans if _lies_in(op, ban.modules, graph)}
    banned |= set(rules.forbidden)
    left = [s for s in found if not s.axis or _name(s, axes) not in banned]
    for pin in rules.pins:
        pinned = [s for s in left if _name(s, axes) == pin.axis]
        # the first pin that the op can follow applies
        if pinned and _lies_in(op, pin.modules, graph):
            return tuple(left if _is_view_of_inner(op, pin.axis, axes) else pinned)
    return tuple(left)


def _is_view_of_inner(op: Op, axis: str, axes: GraphAxes) -> bool:
    """Whether an op is a view with this axis as an inner factor of a dim of its input or output."""
    if rule_of(op.target).traffic is not Traffic.NONE:
        return False
    dims = [dim for name in (*op.inputs, *op.outputs) for dim in axes.dims[name]]
    inner = [d for dim in dims if isinstance(dim, FlattenedDims) for d in dim.factors[1:]]
    return any(axes.names[leaf.name] == axis for dim in inner for leaf in leaves(dim))


def check_rules(rules: LayoutRules, graph: Graph, axes: GraphAxes, layers: Layers) -> None:
    """Raise InputError for an unknown axis or module, and for a rule that cannot be followed."""
    names = {name for name in axes.names.values() if not name.isdigit()}
    scoped: tuple[LayoutPin | Ban, ...] = (*rules.pins, *rules.bans)
    named = [*rules.forbidden, *(rule.axis for rule in scoped)]
    for name in named:
        if name and name not in axes.names.values():
            raise _unknown("axis", name, names)
    paths = {graph.calls[c].path for c in graph.index.ops_in}
    for rule in scoped:
        if not any(fnmatchcase(path, rule.modules) for path in paths):
            raise _unknown("module", rule.modules, paths - {""})
        _check_equal_layers(rule.modules, graph, layers)
    for pin in rules.pins:
        _check_axis(pin, rules, graph, axes)


def _check_equal_layers(modules: str, graph: Graph, layers: Layers) -> None:
    """Raise for a rule that matches only some layers of a class: all have the same layouts."""
    for layer_class in layers.classes:
        meant = {
            number: tuple(_lies_in(op, modules, graph) for op in layers.layers[number].ops)
            for number in layer_class.layers
        }
        if len(set(meant.values())) > 1:
            some = next(number for number in meant if any(meant[number]))
            raise InputError(
                f"{modules!r} means some of the {len(meant)} equal layers of class "
                f"{layer_class.name}, which are all split alike",
                where=graph.calls[layers.layers[some].call].path,
                fix=f"name the module in all of them: {_in_all(modules)!r}",
            )


def _in_all(modules: str) -> str:
    """Return a pattern with stars for its numbers: "h.3.mlp" becomes "h.*.mlp"."""
    return ".".join("*" if part.isdecimal() else part for part in modules.split("."))


def _check_axis(pin: LayoutPin, rules: LayoutRules, graph: Graph, axes: GraphAxes) -> None:
    """Raise for a pin along an axis that is forbidden, or that its modules do not have."""
    if not pin.axis:
        return
    if pin.axis in rules.forbidden:
        raise InfeasibleError(
            f"one rule splits {pin.axis} in {pin.modules!r}, another never splits it anywhere",
            fix="leave out one of the two rules",
        )
    ops = [op for op in graph.ops if _lies_in(op, pin.modules, graph)]
    for ban in rules.bans:
        if ban.axis == pin.axis and any(_lies_in(op, ban.modules, graph) for op in ops):
            raise InfeasibleError(
                f"one rule splits {pin.axis} in {pin.modules!r}, another never splits it in "
                f"{ban.modules!r}",
                fix="leave out one of the two rules",
            )
    tensors = {name for op in ops for name in (*op.inputs, *op.outputs)}
    have = {
        axes.names[leaf.name] for name in tensors for dim in axes.dims[name] for leaf in leaves(dim)
    }
    if pin.axis not in have:
        there = ", ".join(sorted(name for name in have if not name.isdigit()))
        raise InputError(
            f"nothing in {pin.modules!r} can be split along {pin.axis}: it has no such axis",
            expected=f"one of {there}" if there else "",
        )


def _name(strategy: OpLayout, axes: GraphAxes) -> str:
    return axes.names[strategy.axis] if strategy.axis else ""


def _lies_in(op: Op, modules: str, graph: Graph) -> bool:
    around = graph.index.around(op.call)
    return any(fnmatchcase(graph.calls[call].path, modules) for call in around)


def _unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    nearest = get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:5]
    return InputError(
        f"The model has no {kind} {name!r}.",
        expected=f"The nearest are: {', '.join(nearest)}." if nearest else "",
    )
