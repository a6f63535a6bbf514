"""Checks that the modules and axes which constraints name are those of the model."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from autopar.planner.axes.infer import Axes
from autopar.planner.errors import InputError
from autopar.planner.graph import Graph
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    RecomputePin,
    SplitRule,
    StagePin,
    covers,
)

_MOST_TOLD = 12


def check_names(
    constraints: Constraints,
    graph: Graph,
    axes: Axes,
    *,
    layers: int,
) -> None:
    """Raise one error that tells all names and stages in constraints that the model has not."""
    faults = [
        (one.origin, fault)
        for one in constraints.declared
        for fault in _faults(one, graph, axes, layers=layers)
    ]
    if not faults:
        return
    found = [fault for _, fault in faults]
    raise InputError(
        found[0] if len(found) == 1 else "\n".join(f"- {fault}" for fault in found),
        where="; ".join(dict.fromkeys(origin for origin, _ in faults)),
        fix="autopar inspect MODEL shows the modules and axes of a model",
    )


def _faults(one: Declared, graph: Graph, axes: Axes, *, layers: int) -> Iterator[str]:
    rule = one.value
    if not isinstance(rule, (SplitRule, StagePin, RecomputePin)):
        return
    paths = tuple(dict.fromkeys(call.path for call in graph.calls.values() if call.path))
    if not any(covers(rule.modules, path) for path in paths):
        yield f"the model has no module {rule.modules!r}{_hint(rule.modules, paths)}"
    if isinstance(rule, SplitRule):
        known = axis_names(axes)
        if rule.axis not in known:
            yield f"the model has no axis {rule.axis!r}{_hint(rule.axis, known)}"
    if isinstance(rule, StagePin) and rule.stage >= layers:
        yield f"there is no stage {rule.stage}: {layers} layers make at most as many stages"


def axis_names(axes: Axes) -> tuple[str, ...]:
    """Return the axes that have a name, as people call them."""
    named = {name for name in axes.names.values() if not name.isdigit()}
    return tuple(sorted(named))


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": there are {', '.join(known[:_MOST_TOLD])}{', …' if len(known) > _MOST_TOLD else ''}"
