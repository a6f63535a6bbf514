"""Tells what each pipeline stage of a script holds and gives, and which weights stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from autopar.codegen.forward.crossings import CROSSING
from autopar.codegen.forward.opened import Crossing, Opened, Stage
from autopar.codegen.python_text import (
    Group,
    Source,
    assigned,
    call,
    identifier,
    literal,
    table,
    tuple_of,
)
from autopar.codegen.script.name_patterns import numbered_tuple, outermost
from autopar.codegen.script.parameter_tables import aliases_of, names_with_aliases, parts_text
from autopar.planner.axes.infer import Axes
from autopar.planner.extent import BATCH, Extent
from autopar.planner.findings.learning import learning_parameters
from autopar.planner.graph import Graph
from autopar.planner.layouts import Kind
from autopar.planner.ops import MODEL_DTYPE
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.plan import Stage as PlannedStage
from autopar.planner.programs.layouts.cuts import Parts, parts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTables:
    """The tables of a pipelined script; `ties` is empty where stages share no weights."""

    stages: Source
    ties: Source


def stage_tables(plan: Plan, opened: Opened, axes: Axes, *, last: str) -> StageTables:
    """Return what the stages hold and give; `last` is the class of the last one."""
    holds = stage_holds(plan.graph, opened.stages)
    functions = crossing_names(opened)
    follows = crossings_follow_rows(opened, axes)
    gives: list[Group | str] = [
        functions.get(stage.crossing) or _gives(stage, plan, axes, follows_rows=follows)
        for stage in opened.stages
    ]
    are_alike = len(set(gives[:-1])) == 1 and not functions
    rows = []
    for number, stage in enumerate(opened.stages):
        kind = last if stage is opened.stages[-1] else stage.cls.name
        held = numbered_tuple(outermost(holds[number], names_with_aliases(plan.graph)))
        arguments: list[str | Group] = [identifier(kind), held]
        if stage.gives:
            arguments.append("CROSSING" if are_alike else gives[number])
        if stage.bounds:
            arguments.append(f"bounds={literal(dict(stage.bounds))}")
        rows.append(("", call("StagePart", *arguments), ""))
    stages = table("STAGES", ("(", ")"), rows)
    if are_alike:
        assert isinstance(gives[0], Group)
        crossing = assigned("CROSSING", gives[0], "what each stage gives to the next")
        stages = Source(f"{crossing}\n{stages}")
    return StageTables(stages=stages, ties=_ties(plan, holds))


def crossing_names(opened: Opened) -> dict[str, Source]:
    """Return the names of the functions that tell what stages give, by their sources."""
    sources = list(dict.fromkeys(stage.crossing for stage in opened.stages if stage.crossing))
    if len(sources) == 1:
        return {sources[0]: Source(CROSSING)}
    return {source: Source(f"{CROSSING}{n}") for n, source in enumerate(sources, start=1)}


def _gives(stage: Stage, plan: Plan, axes: Axes, *, follows_rows: bool) -> Group:
    return tuple_of(*(_crossing(one, plan, axes, follows_rows=follows_rows) for one in stage.gives))


def stage_holds(graph: Graph, stages: Sequence[Stage]) -> tuple[frozenset[str], ...]:
    """Return the names that each stage holds.

    What no stage uses stays with the one whose modules are nearest: their code may still call it.
    """
    aliases = aliases_of(graph)
    canonical = {alias: name for name, names in aliases.items() for alias in names}
    used = [{canonical.get(name, name) for name in stage.parameters} for stage in stages]
    unused = set(aliases) - set().union(*used)
    for name in sorted(unused):
        near = [_common_steps(name, stage) for stage in stages]
        used[near.index(max(near))].add(name)
    return tuple(
        frozenset(
            alias
            for name in names
            for alias in aliases.get(name, (name,))
            if alias == name or name in unused or alias.rpartition(".")[0] in stage.modules
        )
        for names, stage in zip(used, stages, strict=True)
    )


def _common_steps(name: str, stage: Stage) -> int:
    """Return how far a parameter's path runs along with that of one of a stage's modules."""
    steps = name.split(".")

    def together(path: str) -> int:
        pairs = zip(steps, path.split("."), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(map(together, stage.modules), default=0)


def crossings_follow_rows(opened: Opened, axes: Axes) -> bool:
    """Whether stages give each other tensors whose sizes are multiples of the rows, or constant."""
    gives = [one for stage in opened.stages for one in stage.gives]
    sizes = {extent for one in gives for extent in one.shape if not extent.is_constant}
    are_multiples = all(not any(size.coefficients[:1] + size.coefficients[2:]) for size in sizes)
    parts = [_parts(one, axes, 2) == _parts(one, axes, 3) for one in gives]
    return not opened.splits_rows and are_multiples and all(parts)


def _parts(crossing: Crossing, axes: Axes, rows: int) -> Parts:
    """Return how a tensor of so many rows is cut, () where it is whole."""
    layout = crossing.layout
    if layout.kind is not Kind.SPLIT:
        return ()
    return parts_of(axes.dims[crossing.name][layout.dim], layout.axis, rows)


def _crossing(crossing: Crossing, plan: Plan, axes: Axes, *, follows_rows: bool) -> Group:
    microbatch = plan.arrangement.microbatch
    size_of = _size if follows_rows else partial(_planned_size, microbatch=microbatch)
    shape = ", ".join(size_of(extent) for extent in crossing.shape)
    arguments = [f"({shape},)" if len(crossing.shape) == 1 else f"({shape})"]
    layout = crossing.layout
    if parts := _parts(crossing, axes, microbatch):
        arguments.append(f"Split({layout.dim}, {parts_text(parts)})")
    if crossing.dtype != MODEL_DTYPE:
        arguments.append(f"dtype=torch.{identifier(crossing.dtype)}")
    if not crossing.has_gradient:
        arguments.append("has_gradient=False")
    return call("Crossing", *arguments)


def _size(extent: Extent) -> str:
    """Return a size of a tensor, which may be a multiple of the rows of a microbatch."""
    if extent.is_constant:
        return literal(extent.at(0))
    return "ROWS" if extent == BATCH else f"ROWS * {literal(extent.at(1))}"


def _planned_size(extent: Extent, *, microbatch: int) -> str:
    return "MICROBATCH" if extent == BATCH else literal(extent.at(microbatch))


def _ties(plan: Plan, holds: Sequence[frozenset[str]]) -> Source:
    """Return the learning parameters that several stages hold, and on which pipeline ranks."""
    learning = learning_parameters(plan.graph)
    rows = []
    for name, names in aliases_of(plan.graph).items():
        ranks = [s.rank for s, held in zip(_in_order(plan), holds, strict=True) if name in held]
        if len(ranks) > 1 and name in learning:
            shared = literal(tuple(sorted(set(ranks))))
            rows.append(call("Tie", tuple_of(*map(literal, names)), shared))
    return assigned("TIES", tuple_of(*rows)) if rows else Source()


def _in_order(plan: Plan) -> Sequence[PlannedStage]:
    return sorted(plan.stages, key=lambda stage: stage.first)
