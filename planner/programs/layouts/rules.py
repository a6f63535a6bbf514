"""What a person allows of the layouts: axes forbidden or allowed by name, modules pinned.

Layers of one class are split alike, so a rule means all of them or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopar.planner.axes.infer import Axes
from autopar.planner.errors import InfeasibleError, InputError
from autopar.planner.graph import Graph
from autopar.planner.layers import Layers
from autopar.planner.layouts import OpLayout
from autopar.planner.ops import Op
from autopar.planner.rules.rule import Traffic
from autopar.planner.rules.table import rule_of
from autopar.planner.rules.terms import Product, leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The ops of these modules (`h.*.mlp`) are split along this axis where they can be.

    With the axis "" they are not split at all.
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
    """Axes go by the names that people read (seq, heads, ffn); no `allowed` allows all."""

    forbidden: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    pins: tuple[Pin, ...] = ()
    bans: tuple[Ban, ...] = ()


FREE = LayoutRules()


def permitted(
    op: Op, found: Sequence[OpLayout], rules: LayoutRules, graph: Graph, axes: Axes
) -> tuple[OpLayout, ...]:
    """Return the strategies of an op that the rules leave; not splitting it is always one.

    A pin leaves the strategies along its axis alone; an op that cannot be split so stays free, and
    so does a view that has the axis inside another: no conversion gathers what it would give.
    """
    banned = {ban.axis for ban in rules.bans if _lies_in(op, ban.modules, graph)}
    left = [s for s in found if not s.axis or _is_allowed(_name(s, axes), rules)]
    left = [s for s in left if not s.axis or _name(s, axes) not in banned]
    for pin in rules.pins:
        pinned = [s for s in left if _name(s, axes) == pin.axis]
        if pinned and _lies_in(op, pin.modules, graph):  # the first that the op can keep decides
            return tuple(left if _merges(op, pin.axis, axes) else pinned)
    return tuple(left)


def _merges(op: Op, axis: str, axes: Axes) -> bool:
    """Whether an op is a view that flattens an axis, or takes one apart, as an inner factor."""
    if rule_of(op.target).traffic is not Traffic.NONE:
        return False
    dims = [dim for name in (*op.inputs, *op.outputs) for dim in axes.dims[name]]
    inner = [d for dim in dims if isinstance(dim, Product) for d in dim.factors[1:]]
    return any(axes.names[leaf.name] == axis for dim in inner for leaf in leaves(dim))


def check_rules(rules: LayoutRules, graph: Graph, axes: Axes, layers: Layers) -> None:
    """Raise InputError for an unknown axis or module, and for a rule that cannot be kept."""
    names = {name for name in axes.names.values() if not name.isdigit()}
    scoped: tuple[Pin | Ban, ...] = (*rules.pins, *rules.bans)
    named = [*rules.forbidden, *(rules.allowed or ()), *(rule.axis for rule in scoped)]
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
    """Refuse a rule that means some of the layers of a class: they have the same layouts."""
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
    """Return a pattern with its numbers opened: "h.3.mlp" becomes "h.*.mlp"."""
    return ".".join("*" if part.isdecimal() else part for part in modules.split("."))


def _check_axis(pin: Pin, rules: LayoutRules, graph: Graph, axes: Axes) -> None:
    """Refuse a pin along an axis that is forbidden there, or that no tensor in its modules has."""
    if not pin.axis:
        return
    if pin.axis in rules.forbidden:
        raise InfeasibleError(
            f"{pin.axis} is to be split in {pin.modules!r}, and never anywhere",
            fix="leave out one of the two rules",
        )
    ops = [op for op in graph.ops if _lies_in(op, pin.modules, graph)]
    for ban in rules.bans:
        if ban.axis == pin.axis and any(_lies_in(op, ban.modules, graph) for op in ops):
            raise InfeasibleError(
                f"{pin.axis} is to be split in {pin.modules!r}, and never in {ban.modules!r}",
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


def _is_allowed(name: str, rules: LayoutRules) -> bool:
    return name not in rules.forbidden and (rules.allowed is None or name in rules.allowed)


def _name(strategy: OpLayout, axes: Axes) -> str:
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
