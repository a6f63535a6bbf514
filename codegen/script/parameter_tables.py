"""Tells what a plan does to each parameter on the tensor axis: how it is split, whether summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.codegen.python_text import (
    Source,
    assigned,
    call,
    literal,
    row,
    starred,
    table,
    tuple_of,
)
from autopar.codegen.script.name_patterns import numbered_rows, numbered_tuple, outermost, patterns
from autopar.planner.axes.infer import Axes
from autopar.planner.costs.prediction import Zero
from autopar.planner.findings.learning import learning_parameters
from autopar.planner.findings.steady_buffers import steady_buffers
from autopar.planner.graph import Graph
from autopar.planner.layouts import Kind
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.meaning import narrowed_buffers
from autopar.planner.programs.layouts.cuts import Parts, parts_of


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """How a parameter or buffer is cut: the dim, its parts as Python, and the axis' name."""

    dim: int
    parts: str
    axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTables:
    """The tables of a script; empty text where a plan needs none."""

    splits: Source
    summed: Source


def parameter_tables(plan: Plan, axes: Axes) -> ParameterTables:
    """Return the tables of parameters that are split, and of those whose gradients are summed."""
    if plan.arrangement.tensor == 1:
        return ParameterTables(splits=Source(), summed=Source())
    known = list(names_with_aliases(plan.graph))
    splits = dict(_splits(plan, axes))
    summed = dict.fromkeys(_summed(plan), True)
    return ParameterTables(
        splits=_splits_table(patterns(splits, known)) if splits else Source(),
        summed=_summed_table(patterns(summed, known)) if summed else Source(),
    )


def names_with_aliases(graph: Graph) -> Iterator[str]:
    """Yield every name of every parameter and buffer."""
    for names in aliases_of(graph).values():
        yield from names


def aliases_of(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Return all names of each parameter and buffer, by the name that the graph has for it."""
    found = {p.name: tuple(dict.fromkeys((p.name, *p.aliases))) for p in graph.parameters}
    return found | {buffer.name: (buffer.name,) for buffer in graph.buffers}


def unread(plan: Plan) -> Source:
    """Return the list of what would learn, but no gradient reaches, where fully_shard makes zeros.

    A unit whose inputs the loss does not depend on hands back zeros for them, where one process
    has no gradient: weights behind them would decay.
    """
    graph = plan.graph
    has_unused = any(call.has_unused for call in graph.calls.values())
    if not has_unused or plan.arrangement.data == 1 or plan.arrangement.zero < Zero.GRADIENTS:
        return Source()
    aliases = aliases_of(graph)
    learns = [one.name for one in graph.parameters if one.trainable]
    found = {alias for name in learns if name not in graph.index.readers for alias in aliases[name]}
    known = [alias for name in learns for alias in aliases[name]]
    return assigned("UNREAD", numbered_tuple(outermost(found, known))) if found else Source()


def once(plan: Plan) -> Source:
    """Return the list of buffers that a step writes once, where it has several microbatches."""
    found = steady_buffers(plan.graph) if plan.arrangement.microbatches > 1 else ()
    known = [one.name for one in plan.graph.buffers]
    return assigned("ONCE", numbered_tuple(outermost(found, known))) if found else Source()


def half_buffers(plan: Plan) -> Source:
    """Return the list of buffers that a plan in 16 bits has in 16 bits, though not so built."""
    found = dict.fromkeys((one.name for one in narrowed_buffers(plan)), True)
    names = patterns(found, [one.name for one in plan.graph.buffers])
    meaning = "buffers in 16 bits too, for the model computes with them as they are"
    return assigned("HALF_BUFFERS", tuple_of(*map(literal, names)), meaning) if found else Source()


def _splits(plan: Plan, axes: Axes) -> Iterator[tuple[str, ParameterSplit]]:
    aliases = aliases_of(plan.graph)
    for one in plan.parameters:
        layout = one.layout
        if layout.kind is Kind.SPLIT and one.name in aliases:
            parts = parts_of(axes.dims[one.name][layout.dim], layout.axis, 1)
            name = axes.names.get(layout.axis, layout.axis)
            for alias in aliases[one.name]:
                yield alias, ParameterSplit(layout.dim, parts_text(parts), name)


def parts_text(parts: Parts) -> str:
    """Return the parts of a dim as Python; those of fused weights are often alike."""
    if len(parts) > 1 and len(set(parts)) == 1:
        return f"({literal(parts[0])},) * {len(parts)}"
    return literal(parts)


def _summed(plan: Plan) -> Iterator[str]:
    aliases = aliases_of(plan.graph)
    learning = learning_parameters(plan.graph)
    for one in plan.parameters:
        if one.layout.kind is Kind.REPLICATED and one.name in learning:
            yield from aliases[one.name]


def _splits_table(splits: Mapping[str, ParameterSplit]) -> Source:
    rows = [
        (*row(names, call("Split", literal(split.dim), split.parts)), split.axis)
        for names, split in numbered_rows(splits)
    ]
    return table("SPLITS", ("{", "}"), rows)


def _summed_table(summed: Mapping[str, bool]) -> Source:
    names = (one for one, _ in numbered_rows(summed))
    return assigned("SUMMED", tuple_of(*map(starred, names)))
