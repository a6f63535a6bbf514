"""Finds what in a plan contradicts itself: what a damaged or hand-edited file may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.findings.recomputable import unable
from autopar.planner.layers import Layers
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.space import shards_in_vain

_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*")
_MOST_SHOWN = 40  # characters


def faults_of(plan: Plan) -> Iterator[str]:
    """Yield each contradiction that shows without the layers of the graph."""
    if not _VERSION.fullmatch(plan.autopar):
        yield f"autopar: {plan.autopar[:_MOST_SHOWN]!r} is no version"
    yield from _degrees(plan)
    yield from _stages(plan)
    yield from _parameters(plan)
    if plan.prediction.step_seconds <= 0 or plan.prediction.peak_flops_per_second <= 0:
        yield "prediction: a step takes no time"


def _degrees(plan: Plan) -> Iterator[str]:
    arrangement = plan.arrangement
    names = (
        "pipeline", "data", "tensor", "shard", "microbatch", "microbatches", "stages_per_rank",
        "bucket_bytes",
    )  # fmt: skip
    below_one = [name for name in names if getattr(arrangement, name) < 1]
    for name in below_one:
        yield f"arrangement.{name} is {getattr(arrangement, name)}, at least 1 is needed"
    if below_one:
        return
    if arrangement.ranks != plan.machines.devices:
        yield (
            f"arrangement: pipeline × data × tensor is {arrangement.ranks}, "
            f"but the machines have {plan.machines.devices} devices"
        )
    if plan.cluster.size != plan.machines.devices:
        yield f"cluster: {plan.cluster.size} devices, but machines.devices is another number"
    if arrangement.data % arrangement.shard:
        yield f"arrangement: shard {arrangement.shard} does not divide data {arrangement.data}"
    if arrangement.rows and not _are_rows(arrangement):
        yield (
            f"arrangement.rows: {len(arrangement.rows)} numbers for {arrangement.data} data ranks "
            f"alone, the most of them {max(arrangement.rows)}, {arrangement.microbatch} expected"
        )
    if shards_in_vain(arrangement):
        yield (
            f"arrangement: ZeRO-{arrangement.zero.value} under {arrangement.schedule}, which keeps "
            "parameters and gradients whole, as ZeRO-1 does"
        )


def _are_rows(arrangement: Arrangement) -> bool:
    """Whether each data rank has its rows, and there are no others to share them with."""
    has_others = arrangement.pipeline * arrangement.tensor > 1
    numbers = len(arrangement.rows) == arrangement.data and min(arrangement.rows) >= 1
    return numbers and not has_others and max(arrangement.rows) == arrangement.microbatch


def _stages(plan: Plan) -> Iterator[str]:
    arrangement = plan.arrangement
    needed = arrangement.pipeline * arrangement.stages_per_rank
    if len(plan.stages) != needed:
        yield f"stages: there are {len(plan.stages)}, but the arrangement needs {needed}"
    if len(plan.prediction.stages) != len(plan.stages):
        yield f"prediction.stages: {len(plan.prediction.stages)} for {len(plan.stages)} stages"
    first = 0
    for number, stage in enumerate(plan.stages):
        if stage.first != first or stage.count < 1:
            yield f"stages.{number}: layers {stage.first} … do not follow those before, {first}"
        if len(stage.recompute) != stage.count:
            yield f"stages.{number}: {len(stage.recompute)} recompute modes, {stage.count} layers"
        if not 0 <= stage.rank < arrangement.pipeline:
            yield f"stages.{number}: there is no rank {stage.rank} on the pipeline axis"
        first = stage.first + stage.count


def _parameters(plan: Plan) -> Iterator[str]:
    graph = plan.graph
    parameters = {one.name for one in graph.parameters}
    known = parameters | {one.name for one in graph.buffers}
    for one in plan.parameters:
        if one.name not in known:
            yield f"parameters: the graph has no parameter {one.name!r}"
    used = {name for op in graph.ops for name in op.inputs}  # what no op reads has no layout
    missing = parameters & used - {one.name for one in plan.parameters}
    for name in sorted(missing):
        yield f"parameters: the layout of {name!r} is missing"


def layout_faults(plan: Plan, layers: Layers) -> Iterator[str]:
    """Yield what does not fit between a plan and the layers of its graph."""
    planned = sum(stage.count for stage in plan.stages)
    if planned != len(layers.layers):
        yield f"stages: they hold {planned} layers, but the graph has {len(layers.layers)}"
    without = unable(layers.layers, plan.graph)
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
            if sizes != (len(op.inputs), len(op.outputs)):
                yield f"layouts.{number}.{position}: other inputs or outputs than {op.name}"
