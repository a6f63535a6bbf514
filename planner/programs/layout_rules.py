"""What a person allows of the layouts: axes forbidden or allowed by name, modules pinned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from autopar.planner.axes.infer import Axes
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph, Op
from autopar.planner.layers import ancestors
from autopar.planner.layouts import OpLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The ops of these modules (`h.*.mlp`) are split along this axis where they can be.

    With the axis "" they are not split at all.
    """

    modules: str
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRules:
    """Axes go by the names that people read (seq, heads, ffn); no `allowed` allows all."""

    forbidden: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    pins: tuple[Pin, ...] = ()


FREE = LayoutRules()


def permitted(
    op: Op, found: Sequence[OpLayout], rules: LayoutRules, graph: Graph, axes: Axes
) -> tuple[OpLayout, ...]:
    """Return the strategies of an op that the rules leave; not splitting it is always one.

    A pin leaves the strategies along its axis alone; an op that cannot be split so stays free.
    """
    left = [s for s in found if not s.axis or _is_allowed(axes.names[s.axis], rules)]
    for pin in rules.pins:
        if _lies_in(op, pin.modules, graph):
            pinned = [s for s in left if _name(s, axes) == pin.axis]
            left = pinned or left
    return tuple(left)


def check_rules(rules: LayoutRules, graph: Graph, axes: Axes) -> None:
    """Raise InputError where a rule names an axis or a module that the model does not have."""
    names = {name for name in axes.names.values() if not name.isdigit()}
    named = [*rules.forbidden, *(rules.allowed or ()), *(pin.axis for pin in rules.pins)]
    for name in named:
        if name and name not in axes.names.values():
            raise _unknown("axis", name, names)
    paths = {graph.calls[c].path for op in graph.ops for c in ancestors(op.call, graph.calls)}
    for pin in rules.pins:
        if not any(fnmatchcase(path, pin.modules) for path in paths):
            raise _unknown("module", pin.modules, paths - {""})


def _is_allowed(name: str, rules: LayoutRules) -> bool:
    return name not in rules.forbidden and (rules.allowed is None or name in rules.allowed)


def _name(strategy: OpLayout, axes: Axes) -> str:
    return axes.names[strategy.axis] if strategy.axis else ""


def _lies_in(op: Op, modules: str, graph: Graph) -> bool:
    calls = ancestors(op.call, graph.calls)
    return any(fnmatchcase(graph.calls[call].path, modules) for call in calls)


def _unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    nearest = get_close_matches(name, known, n=3, cutoff=0.3) or sorted(known)[:5]
    return InputError(
        f"The model has no {kind} {name!r}.",
        expected=f"The nearest are: {', '.join(nearest)}." if nearest else "",
    )
