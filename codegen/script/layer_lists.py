"""Turns a plan into the lists of its layers and the tables of its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from autopar.codegen.forward.classes import CROSSING
from autopar.codegen.forward.opened import CrossingTensor, OpenedSource, StageClass
from autopar.codegen.forward.reading.forward_source import ROOT, common
from autopar.codegen.forward.reading.modules import LOSS_STAGE
from autopar.codegen.script.parameter_tables import (
    aliases_of,
    has_buckets_apart,
    names_with_aliases,
    numbered_tuple,
    outermost,
    split_text,
)
from autopar.codegen.subject import PlannedSubject
from autopar.codegen.text.values import (
    Bracketed,
    Source,
    assigned,
    call,
    identifier,
    literal,
    table,
    tuple_of,
)
from autopar.planner.axes.infer import GraphAxes
from autopar.planner.costs.prediction import Arrangement, Recompute
from autopar.planner.errors import LostLayersError
from autopar.planner.findings.optimizer_call import learning_parameters
from autopar.planner.findings.writes import writing_calls
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import LayoutKind
from autopar.planner.graph.ops import BATCH, MODEL_DTYPE, Extent, refs
from autopar.planner.layers import LINEAR, compiled_ops, last_products
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Float8
from autopar.planner.programs.layouts.strategies import Parts, parts_of
from autopar.runtime.model.parts import is_inside


def stages_table(plan: Plan, opened: OpenedSource, axes: GraphAxes) -> Source:
    """Return the table of what stages hold and send."""
    holds = stage_holds(plan.graph, opened.stages)
    functions = crossing_names(opened)
    follows = crossings_follow_rows(opened, axes)
    gives: list[Bracketed | str] = [
        functions.get(stage.crossing)
        or tuple_of(*(_crossing(one, plan, axes, follows_rows=follows) for one in stage.gives))
        for stage in opened.stages
    ]
    are_alike = len(set(gives[:-1])) == 1 and not functions
    rows = []
    for number, stage in enumerate(opened.stages):
        adds_loss = stage is opened.stages[-1] and not stage.returns_loss
        held = numbered_tuple(outermost(holds[number], names_with_aliases(plan.graph)))
        kind = LOSS_STAGE if adds_loss else stage.cls.name
        arguments: list[str | Bracketed] = [identifier(kind), held]
        if stage.gives:
            arguments.append("CROSSING" if are_alike else gives[number])
        if stage.bounds:
            arguments.append(f"bounds={literal(dict(stage.bounds))}")
        rows.append(("", call("StagePart", *arguments), ""))
    stages = table("STAGES", ("(", ")"), rows)
    if are_alike:
        assert isinstance(gives[0], Bracketed)
        crossing = assigned("CROSSING", gives[0], "the tensors that each stage sends to the next")
        stages = Source(f"{crossing}\n{stages}")
    return stages


def rank_stages(arranged: Arrangement) -> Source:
    """Return the call that returns the stages of a pipeline rank."""
    several = ", STAGES_PER_RANK" * (arranged.stages_per_rank > 1)
    return Source(f"stage_indices(SCHEDULE, mesh.pipeline.rank, PIPELINE{several})")


def crossing_names(opened: OpenedSource) -> dict[str, Source]:
    """Return the names of the functions that describe what stages send, by their sources."""
    sources = list(dict.fromkeys(stage.crossing for stage in opened.stages if stage.crossing))
    if len(sources) == 1:
        return {sources[0]: Source(CROSSING)}
    return {source: Source(f"{CROSSING}{n}") for n, source in enumerate(sources, start=1)}


def stage_holds(graph: Graph, stages: Sequence[StageClass]) -> tuple[frozenset[str], ...]:
    """Return the names of the parameters and buffers that each stage holds.

    A tensor that no stage reads goes to the last stage if the model returns it. Others go to the
    stage with the nearest module path, because that stage may still call the tensor's module.
    """
    aliases = aliases_of(graph)
    canonical = {alias: name for name, names in aliases.items() for alias in names}
    used = [{canonical.get(name, name) for name in stage.parameters} for stage in stages]
    unused = set(aliases) - set().union(*used)
    used[-1] |= unused.intersection(refs(graph.calls[ROOT].result))
    for name in sorted(unused - used[-1]):
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


def _common_steps(name: str, stage: StageClass) -> int:
    """Return the length of the longest path prefix that a tensor shares with a stage's modules."""
    names = tuple(name.split("."))
    shared = (common([names, tuple(path.split("."))]) for path in stage.modules)
    return max(map(len, shared), default=0)


def crossings_follow_rows(opened: OpenedSource, axes: GraphAxes) -> bool:
    """Whether every size of a sent tensor is a constant, or a multiple of the number of rows.

    False if tensor ranks split rows, or if the number of rows decides how a tensor is cut.
    """
    gives = [one for stage in opened.stages for one in stage.gives]
    sizes = {extent for one in gives for extent in one.shape if not extent.is_constant}
    are_multiples = all(not any(size.coefficients[:1] + size.coefficients[2:]) for size in sizes)
    parts = [_parts(one, axes, 2) == _parts(one, axes, 3) for one in gives]
    return not opened.splits_rows and are_multiples and all(parts)


def _parts(crossing: CrossingTensor, axes: GraphAxes, rows: int) -> Parts:
    """Return how a tensor is cut if it has `rows` rows, or () if it is whole."""
    layout = crossing.layout
    if layout.kind is not LayoutKind.SPLIT:
        return ()
    return parts_of(axes.dims[crossing.name][layout.dim], layout.axis, rows)


def _crossing(
    crossing: CrossingTensor, plan: Plan, axes: GraphAxes, *, follows_rows: bool
) -> Bracketed:
    microbatch = plan.arrangement.microbatch
    size_of = _size if follows_rows else partial(_planned_size, microbatch=microbatch)
    shape = ", ".join(size_of(extent) for extent in crossing.shape)
    arguments = [f"({shape},)" if len(crossing.shape) == 1 else f"({shape})"]
    layout = crossing.layout
    if parts := _parts(crossing, axes, microbatch):
        arguments.append(split_text(layout.dim, parts))
    if crossing.dtype != MODEL_DTYPE:
        arguments.append(f"dtype=torch.{identifier(crossing.dtype)}")
    if not crossing.has_gradient:
        arguments.append("has_gradient=False")
    return call("Crossing", *arguments)


def _size(extent: Extent) -> str:
    """Return a size as Python: a constant, or a multiple of ROWS."""
    if extent.is_constant:
        return literal(extent.at(0))
    return "ROWS" if extent == BATCH else f"ROWS * {literal(extent.at(1))}"


def _planned_size(extent: Extent, *, microbatch: int) -> str:
    return "MICROBATCH" if extent == BATCH else literal(extent.at(microbatch))


def ties_table(plan: Plan, opened: OpenedSource) -> Source:
    """Return the trainable parameters that several stages hold, with their pipeline ranks."""
    learning = learning_parameters(plan.graph)
    stages = sorted(plan.stages, key=lambda stage: stage.first)
    holds = stage_holds(plan.graph, opened.stages)
    rows = []
    for name, names in aliases_of(plan.graph).items():
        ranks = [s.rank for s, held in zip(stages, holds, strict=True) if name in held]
        if len(ranks) > 1 and name in learning:
            shared = literal(tuple(sorted(set(ranks))))
            rows.append(call("Tie", tuple_of(*map(literal, names)), shared))
    apart = "; their gradients are in buckets of their own" * has_buckets_apart(plan.arrangement)
    meaning = f"shared weights, and their pipeline ranks{apart}"
    return assigned("TIES", tuple_of(*rows), meaning) if rows else Source()


def layer_lists(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the script's lists of layers, named LAYERS, COMPILED or by recompute mode."""
    paths = _paths(subject)
    modes = plan.layer_modes
    _check_recomputed(subject, paths, modes)
    found = []
    if plan.arrangement.zero.shards_modules:
        found.append(_listed("LAYERS", _gathered_alone(subject, paths), "gathered one by one"))
    if plan.arrangement.compile.takes_layers:
        found.append(
            _listed("COMPILED", compiled_layers(plan, subject), "each compiled by torch.compile")
        )
    for name in _used_tables(plan):
        own = [p for p, mode in zip(paths, modes, strict=True) if p and name in mode.tables]
        found.append(_listed(name, own, CALLS[name][1]))
    return Source("\n".join(found))


def compiled_layers(plan: Plan, subject: PlannedSubject) -> list[str]:
    """Return the paths of layers to compile; a head whose loss is computed in chunks is not."""
    layers = zip(subject.layers.layers, _paths(subject), plan.layer_modes, strict=True)
    return [
        path
        for layer, path, mode in layers
        if path and compiled_ops(layer, subject.graph) and not mode.makes_chunks
    ]


def built_part(plan: Plan) -> str:
    """Return the script's variable for what a rank wraps: the model, or a part of it."""
    return "part" if plan.arrangement.pipeline > 1 else "model"


def compile_call(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that compiles layers, or "" if none are compiled."""
    if not plan.arrangement.compile.takes_layers:
        return Source()
    varies = subject.file.build_collate is not None  # a batch is as long as its longest row
    more = ", lengths_vary=True" * varies
    more += ", fusing=mesh.tensor" * plan.arrangement.compile.fuses_messages
    return Source(f"compile_layers({built_part(plan)}, COMPILED{more})")


def float8_call(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the call that lets linear layers multiply in float8, or "" if none do."""
    float8 = plan.arrangement.float8
    if float8 is Float8.NONE:
        return Source()
    given = [built_part(plan), "COMPILED", literal(float8.value)]
    if heads := heads_in(compiled_layers(plan, subject), subject):
        given.append(f"excluding={literal(heads)}")
    return Source(call("use_float8", *given).laid_out(before=4, indent=4))


def heads_in(layers: Collection[str], subject: PlannedSubject) -> tuple[str, ...]:
    """Return the paths of modules in `layers` that compute the last products before the loss."""
    calls, last = subject.graph.calls, last_products(subject.graph)
    called = (calls[op.call] for op in subject.graph.ops if op.name in last and op.call in calls)
    paths = dict.fromkeys(one.path for one in called if one.class_name == LINEAR)
    return tuple(path for path in paths if is_inside(path, layers))


def _check_recomputed(
    subject: PlannedSubject, paths: Sequence[str], modes: Sequence[Recompute]
) -> None:
    """Raise if the plan recomputes a layer that the script does not call as a module."""
    calls = subject.graph.calls
    lost = [
        calls[layer.call].path
        for layer, path, mode in zip(subject.layers.layers, paths, modes, strict=True)
        if mode.wraps_layers and not path
    ]
    if lost:
        raise LostLayersError(lost)


# The script's lists of layers: their names, the call made with each `layer` or with all `layers`,
# and the comment on the list.
CALLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "RECOMPUTED_IN_PART": (
            'recompute(layer, "selective")',
            "run again in the backward, except for matrix products",
        ),
        "RECOMPUTED": ('recompute(layer, "full")', "run again in the backward"),
        "CHUNKED": (
            "chunk_logits(layer, LOSS_CHUNKS)",
            "the loss computes the logits, chunk by chunk",
        ),
        "ON_HOST": ("save_on_host(layers, mesh.device)", "saved tensors lie on the host"),
    }
)


def _used_tables(plan: Plan) -> list[str]:
    """Return the constants in `CALLS` that the script has for the plan's modes."""
    used = {table for mode in plan.layer_modes for table in mode.tables}
    return [table for table in CALLS if table in used]


def recomputations(plan: Plan) -> Iterator[Source]:
    """Yield each call with all layers of a table, or a loop that makes it with each layer."""
    for name in _used_tables(plan):
        made, layers = CALLS[name][0], f"submodules({built_part(plan)}, {name})"
        if "layers" in made:
            yield Source(made.replace("layers", layers))
        else:
            yield Source(f"for layer in {layers}:\n        {made}")


def writing_list(plan: Plan, subject: PlannedSubject) -> Source:
    """Return the list of gathered or recomputed layers that write to memory read by other code."""
    units = plan.arrangement.zero.shards_modules
    calls = {
        layer.call: path
        for layer, path, mode in zip(
            subject.layers.layers, _paths(subject), plan.layer_modes, strict=True
        )
        if path and (units or mode.runs_again)
    }
    writing = writing_calls(subject.graph, calls)
    found = [path for call, path in calls.items() if call in writing]
    return _listed("WRITING", found) if found else Source()


def _paths(subject: PlannedSubject) -> list[str]:
    """Return the path of each layer's module, or "" if the script does not call it as a module."""
    return [_path(subject, layer.call) for layer in subject.layers.layers]


def _gathered_alone(subject: PlannedSubject, paths: Iterable[str]) -> list[str]:
    """Return the layers whose parameters are only read inside them.

    fully_shard gathers a layer's parameters while it runs. Parameters that are also read elsewhere
    (a tied embedding) must be gathered with the model itself.
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


def _path(subject: PlannedSubject, call: str) -> str:
    calls = subject.graph.calls
    return calls[call].path if call in calls and call not in subject.opened.inlined else ""


def _listed(name: str, paths: Sequence[str], comment: str = "") -> Source:
    unique = list(dict.fromkeys(paths))
    return assigned(name, numbered_tuple(unique), comment)


def own_rows_table(opened: OpenedSource) -> Source:
    """Return the table of the batch's keys of which a tensor rank has only its own rows."""
    if not opened.own_rows:
        return Source()
    keys = tuple_of(*map(literal, opened.own_rows))
    return assigned("OWN_ROWS", keys, "keys of the batch: a tensor rank gets only its own rows")
