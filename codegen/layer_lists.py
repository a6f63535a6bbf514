"""Tells which modules are the layers of a script: units of sharding and of recomputation."""

from __future__ import annotations

from types import MappingProxyType

from autopar.codegen.name_patterns import numbered_runs
from autopar.codegen.python_text import Source, tuple_of
from autopar.codegen.script_view import Recomputation
from autopar.codegen.subject import Subject
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.plan.plan import Plan

_TABLES = MappingProxyType(
    {Recompute.FULL: "RECOMPUTED", Recompute.SELECTIVE: "RECOMPUTED_IN_PART"}
)


def layer_lists(plan: Plan, subject: Subject) -> Source:
    """Return the lists of layers that a script needs."""
    paths = _paths(subject)
    modes = _modes(plan)
    found = []
    if plan.arrangement.zero >= Zero.GRADIENTS:
        found.append(_listed("LAYERS", [path for path in paths if path]))
    for one in recomputations(plan):
        found.append(
            _listed(
                one.table,
                [p for p, mode in zip(paths, modes, strict=True) if p and str(mode) == one.mode],
            )
        )
    return Source("\n".join(found))


def recomputations(plan: Plan) -> tuple[Recomputation, ...]:
    """Return the ways in which layers of a plan are recomputed."""
    modes = set(_modes(plan))
    return tuple(
        Recomputation(table, str(mode)) for mode, table in _TABLES.items() if mode in modes
    )


def _modes(plan: Plan) -> list[Recompute]:
    stages = sorted(plan.stages, key=lambda stage: stage.first)
    return [mode for stage in stages for mode in stage.recompute]


def _paths(subject: Subject) -> list[str]:
    """Return the module of each layer; "" where it is not called as one."""
    return [_path(subject, layer.call) for layer in subject.layers.layers]


def _path(subject: Subject, call: str) -> str:
    calls = subject.graph.calls
    return calls[call].path if call in calls and call not in subject.opened.inlined else ""


def _listed(name: str, paths: list[str]) -> Source:
    unique = list(dict.fromkeys(paths))
    runs = list(numbered_runs(unique))
    return Source(f"{name} = {tuple_of(runs, before=len(name) + 3)}")
