"""Checks that the parts of a plan from a file are consistent."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Set

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Backend
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import refusal
from autopar.planner.costs.steps.state import offloads_wrongly, shards_in_vain
from autopar.planner.findings.writes import unable
from autopar.planner.graph.layouts import Layout, LayoutKind, OpLayout, ParameterLayout
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import Objective
from autopar.planner.plan.plan import Plan, StoredPlan
from autopar.planner.precision import LEAST_OF_PART
from autopar.planner.programs.layouts.edges import crossing_tensors
from autopar.planner.rules.signature import Dim, leaves

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,39}")
_MOST_SHOWN = 40  # characters
_ROUNDING = 1e-6  # sums of seconds may differ by this share


def faults_of(plan: StoredPlan) -> Iterator[str]:
    """Yield each contradiction that can be found without the graph's layers."""
    if not _VERSION.fullmatch(plan.autopar):
        yield f"autopar: {plan.autopar[:_MOST_SHOWN]!r} is no version"
    yield from _words(plan)
    yield from _machines(plan)
    yield from _degrees(plan)
    yield from _stages(plan)
    yield from _classes(plan)
    yield from _prediction(plan)


def _words(plan: StoredPlan) -> Iterator[str]:
    """Yield a fault for each unknown word, and for arguments that occur twice."""
    known = (
        ("objective", plan.objective, Objective),
        ("machines.backend", plan.machines.backend, Backend),
    )
    for where, word, words in known:
        if word not in set(words):
            yield f"{where}: {word[:_MOST_SHOWN]!r} is none of {', '.join(words)}"
    yield from _doubled("model.arguments", (key for key, _ in plan.model.arguments))


def _machines(plan: StoredPlan) -> Iterator[str]:
    nodes, limits = len(plan.cluster.nodes), [name for name, _ in plan.machines.limits]
    if plan.machines.nodes != nodes:
        yield f"machines.nodes is {plan.machines.nodes}, but the cluster has {nodes}"
    devices = tuple(dict.fromkeys(node.device.name for node in plan.cluster.nodes))
    if plan.machines.device != " + ".join(devices):
        device = plan.machines.device[:_MOST_SHOWN]
        yield f"machines.device is {device!r}, but the cluster has {_quoted(devices)}"
    if limits and set(limits) != set(devices):
        yield f"machines.limits: of {_quoted(limits)}, but the cluster has {_quoted(devices)}"
    yield from _doubled("machines.limits", limits)


def _prediction(plan: StoredPlan) -> Iterator[str]:
    prediction = plan.prediction
    together = math.fsum(term.seconds for term in prediction.terms)
    yield from _doubled("prediction.terms", (term.name for term in prediction.terms))
    yield from _doubled(
        "prediction.communication", (one.reason for one in prediction.communication)
    )
    if not math.isclose(together, prediction.step_seconds, rel_tol=_ROUNDING):
        yield (
            f"prediction.terms: together {together:.6g} seconds, but prediction.step_seconds is "
            f"{prediction.step_seconds:.6g}"
        )


def _doubled(where: str, names: Iterable[str]) -> Iterator[str]:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        yield f"{where}: {_quoted(twice)} more than once"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:_MOST_SHOWN]) for name in sorted(names))


def _degrees(plan: StoredPlan) -> Iterator[str]:
    arrangement = plan.arrangement
    shape = PipelineShape(
        ranks=arrangement.pipeline,
        stages_per_rank=arrangement.stages_per_rank,
        microbatches=arrangement.microbatches,
    )
    refused = refusal(arrangement.schedule, shape) if arrangement.pipeline > 1 else ""
    if refused:
        yield f"arrangement.schedule: {refused}"
    if arrangement.ranks != plan.machines.devices:
        yield (
            f"arrangement: pipeline × data × tensor is {arrangement.ranks}, "
            f"but the machines have {plan.machines.devices} devices"
        )
    if plan.cluster.size != plan.machines.devices:
        yield f"cluster: {plan.cluster.size} devices, but machines.devices is another number"
    if arrangement.data % arrangement.shard:
        yield f"arrangement: shard {arrangement.shard} does not divide data {arrangement.data}"
    has_replicas = arrangement.shard < arrangement.data and arrangement.outer.copies > 0
    if arrangement.is_local and not has_replicas:
        yield "arrangement.sync_every: local steps need several replicas, and an outer optimizer"
    if offloads_wrongly(arrangement):
        steps = arrangement.sync_every
        yield f"arrangement.offload: {arrangement.offload} with {steps} local steps"
    if arrangement.outer_parts > max(1, arrangement.sync_every // LEAST_OF_PART):
        yield f"arrangement.outer_parts: each part needs {LEAST_OF_PART} local steps"
    if arrangement.rows and not _are_rows(arrangement):
        yield (
            f"arrangement.rows: {len(arrangement.rows)} numbers for {arrangement.data} data ranks, "
            f"the largest is {max(arrangement.rows)}, but microbatch is {arrangement.microbatch}"
        )
    if shards_in_vain(arrangement):
        yield (
            f"arrangement: ZeRO-{arrangement.zero.value} under {arrangement.schedule}, which keeps "
            "parameters and gradients whole, as ZeRO-1 does"
        )


def _are_rows(arrangement: Arrangement) -> bool:
    """Whether each data rank has a number of rows, and the largest is the microbatch."""
    numbers = len(arrangement.rows) == arrangement.data and min(arrangement.rows) >= 1
    return numbers and max(arrangement.rows) == arrangement.microbatch


def _stages(plan: StoredPlan) -> Iterator[str]:
    arrangement = plan.arrangement
    needed = arrangement.pipeline * arrangement.stages_per_rank
    if len(plan.stages) != needed:
        yield f"stages: there are {len(plan.stages)}, but the arrangement needs {needed}"
    if len(plan.prediction.stages) != len(plan.stages):
        yield f"prediction.stages: {len(plan.prediction.stages)} for {len(plan.stages)} stages"
    first = 0
    for number, stage in enumerate(plan.stages):
        if stage.first != first or stage.count < 1:
            yield f"stages.{number}: its first layer is {stage.first}, but {first} comes next"
        if len(stage.recompute) != stage.count:
            yield f"stages.{number}: {len(stage.recompute)} recompute modes, {stage.count} layers"
        if not 0 <= stage.rank < arrangement.pipeline:
            yield f"stages.{number}: there is no rank {stage.rank} on the pipeline axis"
        first = stage.first + stage.count
    ranks = Counter(stage.rank for stage in plan.stages)
    if len(plan.stages) == needed and set(ranks.values()) != {arrangement.stages_per_rank}:
        yield f"stages: not each rank has {arrangement.stages_per_rank} of them"


def _classes(plan: StoredPlan) -> Iterator[str]:
    if len(plan.classes) != len(plan.layouts):
        yield f"layouts: {len(plan.layouts)} for {len(plan.classes)} classes of layers"
    for number, (one, layouts) in enumerate(zip(plan.classes, plan.layouts, strict=False)):
        if one.ops != len(layouts):
            yield f"layouts.{number}: {len(layouts)} for {one.ops} ops of {one.name[:_MOST_SHOWN]}"


def layout_faults(plan: Plan, axes: GraphAxes, layers: Layers) -> Iterator[str]:
    """Yield contradictions between a plan and the layers of its graph."""
    graph = plan.graph
    held = [one.name for one in graph.parameters] + [one.name for one in graph.buffers]
    yield from _unknown("parameters", plan.parameters, held, "parameter")
    yield from _unknown("crossing", plan.crossing, graph.index.made_by.keys(), "result of an op")
    yield from _outside_faults("parameters", plan.parameters, axes)
    yield from _outside_faults("crossing", plan.crossing, axes)
    if plan.arrangement.tensor > 1:
        read = {one.name for one in graph.parameters} & graph.index.readers.keys()
        yield from _missing("parameters", plan.parameters, read)
        yield from _missing("crossing", plan.crossing, crossing_tensors(layers))
    planned = sum(stage.count for stage in plan.stages)
    if planned != len(layers.layers):
        yield f"stages: they hold {planned} layers, but the graph has {len(layers.layers)}"
    without = unable(layers.layers, plan.graph, precision=plan.arrangement.precision)
    for layer, (mode, hindrances) in enumerate(zip(plan.layer_modes, without, strict=False)):
        if mode in hindrances:
            yield f"stages: layer {layer} cannot be recomputed ({mode}): {hindrances[mode].why}"
    if len(plan.layouts) != len(layers.classes):
        yield f"layouts: {len(plan.layouts)} for {len(layers.classes)} classes of layers"
        return
    for number, (layouts, one) in enumerate(zip(plan.layouts, layers.classes, strict=True)):
        ops = layers.layers[one.layers[0]].ops
        if len(layouts) != len(ops):
            yield f"layouts.{number}: {len(layouts)} for {len(ops)} ops of {one.name}"
            continue
        for position, (layout, op) in enumerate(zip(layouts, ops, strict=True)):
            sizes = (len(layout.needs), len(layout.gives))
            where = f"layouts.{number}.{position}"
            if sizes != (len(op.inputs), len(op.outputs)):
                yield f"{where}: other inputs or outputs than {op.name}"
                continue
            yield from _op_faults(where, layout, axes, op)


def _unknown(
    where: str, own: tuple[ParameterLayout, ...], names: Container[str], kind: str
) -> Iterator[str]:
    for number, one in enumerate(own):
        if one.name not in names:
            yield f"{where}.{number}: the graph has no {kind} {one.name[:_MOST_SHOWN]!r}"


def _missing(where: str, own: tuple[ParameterLayout, ...], names: Set[str]) -> Iterator[str]:
    for name in sorted(names - {one.name for one in own}):
        yield f"{where}: the layout of {name!r} is missing"


def _outside_faults(where: str, own: tuple[ParameterLayout, ...], axes: GraphAxes) -> Iterator[str]:
    for number, one in enumerate(own):
        if one.name in axes.dims:
            yield from _tensor_faults(f"{where}.{number}.layout", one.layout, axes, one.name)


def _op_faults(where: str, layout: OpLayout, axes: GraphAxes, op: Op) -> Iterator[str]:
    letters = axes.ops[op.name].letters
    if layout.letter and layout.letter not in letters:
        yield f"{where}.letter: {op.target} has no letter {layout.letter[:_MOST_SHOWN]!r}"
    elif layout.letter and layout.axis not in _axes_in(letters[layout.letter]):
        yield f"{where}.axis: {layout.axis[:_MOST_SHOWN]!r} is no axis of {layout.letter!r}"
    elif layout.axis and not layout.letter:
        yield f"{where}.axis: {layout.axis[:_MOST_SHOWN]!r} without a letter"
    for name, tensors, own in (
        ("needs", op.inputs, layout.needs),
        ("gives", op.outputs, layout.gives),
    ):
        for number, (tensor, one) in enumerate(zip(tensors, own, strict=True)):
            yield from _tensor_faults(f"{where}.{name}.{number}", one, axes, tensor)


def _tensor_faults(where: str, layout: Layout, axes: GraphAxes, tensor: str) -> Iterator[str]:
    """Yield a fault if a layout has a dim or an axis that its tensor does not have."""
    dims, axis = axes.dims[tensor], layout.axis[:_MOST_SHOWN]
    if layout.kind is not LayoutKind.SPLIT:
        if (layout.axis, layout.dim) != ("", -1):
            yield f"{where}: axis {axis!r} and dim {layout.dim}, but the tensor is not split"
    elif not 0 <= layout.dim < len(dims):
        yield f"{where}: {tensor} has no dim {layout.dim}"
    elif layout.axis not in _axes_in(dims[layout.dim]):
        yield f"{where}: the axis {axis!r} is not in dim {layout.dim} of {tensor}"


def _axes_in(dim: Dim) -> frozenset[str]:
    return frozenset(leaf.name for leaf in leaves(dim))
