"""Tells which modules are the layers of a script: units of sharding and of recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType

from autopar.codegen.python_text import Source, assigned
from autopar.codegen.script.name_patterns import numbered_tuple
from autopar.codegen.script.script_view import Recomputation
from autopar.codegen.subject import Subject
from autopar.planner.costs.prediction import Recompute, Zero
from autopar.planner.errors import InputError
from autopar.planner.findings.writing_layers import writing_calls
from autopar.planner.plan.plan import Plan

_TABLES = MappingProxyType(
    {Recompute.FULL: "RECOMPUTED", Recompute.SELECTIVE: "RECOMPUTED_IN_PART"}
)


def layer_lists(plan: Plan, subject: Subject, *, writing: Sequence[str]) -> Source:
    """Return the lists of layers that a script needs, those that are kept apart among them."""
    paths = _paths(subject)
    modes = plan.layer_modes
    _check_recomputed(subject, paths, modes)
    found = []
    if writing:
        found.append(_listed("WRITING", writing))
    if plan.arrangement.zero >= Zero.GRADIENTS:
        found.append(_listed("LAYERS", _gathered_alone(subject, paths)))
    for one in recomputations(plan):
        found.append(
            _listed(
                one.table,
                [p for p, mode in zip(paths, modes, strict=True) if p and str(mode) == one.mode],
            )
        )
    return Source("\n".join(found))


class LostLayersError(InputError):
    """Layers are to be computed again that no call of a module stands for in the script."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(
            f"layer {paths[0]!r} is to be computed again, but its code has to stand in its "
            "caller's",
            expected="a layer that the script calls as a module",
            fix="plan with recompute none for it, or with another tensor degree",
        )
        self.paths = tuple(dict.fromkeys(paths))


def _check_recomputed(subject: Subject, paths: Sequence[str], modes: Sequence[Recompute]) -> None:
    """Refuse to leave out the recomputation of a layer that no module call stands for."""
    calls = subject.graph.calls
    lost = [
        calls[layer.call].path
        for layer, path, mode in zip(subject.layers.layers, paths, modes, strict=True)
        if mode is not Recompute.NONE and not path
    ]
    if lost:
        raise LostLayersError(lost)


def recomputations(plan: Plan) -> tuple[Recomputation, ...]:
    """Return the ways in which layers of a plan are recomputed."""
    modes = set(plan.layer_modes)
    return tuple(
        Recomputation(table, str(mode)) for mode, table in _TABLES.items() if mode in modes
    )


def writing_layers(plan: Plan, subject: Subject) -> list[str]:
    """Return the layers that must not share memory with others, but write to it."""
    units = plan.arrangement.zero >= Zero.GRADIENTS
    calls = {
        layer.call: path
        for layer, path, mode in zip(
            subject.layers.layers, _paths(subject), plan.layer_modes, strict=True
        )
        if path and (units or mode is not Recompute.NONE)
    }
    writing = writing_calls(subject.graph, calls)
    return [path for call, path in calls.items() if call in writing]


def _paths(subject: Subject) -> list[str]:
    """Return the module of each layer; "" where it is not called as one."""
    return [_path(subject, layer.call) for layer in subject.layers.layers]


def _gathered_alone(subject: Subject, paths: Iterable[str]) -> list[str]:
    """Return the layers whose parameters nothing outside of them reads.

    A layer has its whole parameters while it runs: what is read elsewhere too (a tied embedding)
    has to be gathered with the model itself.
    """
    graph = subject.graph
    readers = [
        (one.name, {graph.calls[call].path for call in graph.index.around(op.call)})
        for one in graph.parameters
        for op in graph.index.readers[one.name]
    ]
    return [
        path
        for path in dict.fromkeys(paths)
        if path and all(path in near or not name.startswith(f"{path}.") for name, near in readers)
    ]


def _path(subject: Subject, call: str) -> str:
    calls = subject.graph.calls
    return calls[call].path if call in calls and call not in subject.opened.inlined else ""


def _listed(name: str, paths: Sequence[str]) -> Source:
    unique = list(dict.fromkeys(paths))
    return assigned(name, numbered_tuple(unique))
