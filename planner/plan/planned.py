"""Turns a traced model and demands into plans, and chooses one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.sheet import device_sheet
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.errors import InputError
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import MODEL_DTYPE, MODEL_EXTREMES, Op
from autopar.planner.layers import Layers, find_layers, float8_linears
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    check_names,
)
from autopar.planner.plan.declared.file import check_tokens
from autopar.planner.plan.declared.limits import with_batch, with_optimizer
from autopar.planner.plan.files.cache import NO_CACHE, Cache, CachedSearch, CachedTrial
from autopar.planner.plan.files.document import cluster_document, parse_plan, plan_text
from autopar.planner.plan.fleet import (
    ChosenPoint,
    Curve,
    Fewer,
    Training,
    Trial,
    choose,
    curve_of,
    fewer_as_fast,
    planned_curve,
)
from autopar.planner.plan.plan import BatchFacts, Plan, PlannedCount, with_graph
from autopar.planner.plan.search.ahead import Idle, idle_cores
from autopar.planner.plan.search.demands import check_memory
from autopar.planner.plan.search.space import allow_degrees, check_degrees
from autopar.planner.plan.solving.prices import LayoutKey, LeastKey, Prices
from autopar.planner.plan.telling.comparison import seconds_saved_by_fusing
from autopar.planner.plan.traced import TracedModel
from autopar.planner.precision import Float8
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDemands:
    """Everything that a plan must satisfy, besides its model."""

    clusters: tuple[Cluster, ...]  # one of them is chosen
    constraints: Constraints
    time_limit_seconds: float | None = None
    measured: Measurements | None = None
    looks_at_fewer: bool = True  # also plan for fewer devices of a rented cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plans for all numbers of devices, the chosen one, and fewer devices that are as fast."""

    training: Training
    curve: Curve
    choice: ChosenPoint
    fewer: Fewer | None = None
    is_from_cache: bool = False

    @property
    def plan(self) -> Plan:
        """The plan for the chosen number of devices, with the figures of the others."""
        plan = self.choice.point.plan
        if len(self.curve.points) == 1:
            return plan
        counts = (
            PlannedCount(
                arrangement=one.plan.arrangement,
                step_seconds=one.step_seconds,
                device_bytes=one.plan.prediction.peak_memory.device_bytes,
                usd_per_hour=one.plan.machines.usd_per_hour,
            )
            for one in self.curve.points
        )
        return replace(plan, curve=tuple(counts))


def check_demands(demands: PlanDemands) -> None:
    """Reject demands that no model can meet, before one is traced."""
    _check_degrees(demands.clusters, demands.constraints, BatchFacts(may_be_uneven=True))
    check_memory(demands.clusters[-1], demands.constraints)
    check_float8(demands.clusters[-1], demands.constraints)
    check_fused(demands.clusters[-1], demands.constraints)


def check_fused(cluster: Cluster, constraints: Constraints) -> None:
    """Raise if fused messages are demanded, but a node cannot have two tensor ranks on GPUs.

    A fused op multiplies matrices while it copies pieces of them between GPUs of one node.
    """
    if constraints.compile is None or not constraints.compile.fuses_messages:
        return
    most, wanted = min(node.devices for node in cluster.nodes), constraints.tensor
    cpus = [node.device.name for node in cluster.nodes if node.device.is_cpu]
    if cpus:
        why = f"{cpus[0]} has no such ops"
    elif most == 1:
        why = "a node has one device"
    elif 1 in (wanted, constraints.max_tensor):
        why = "one tensor rank sends no such messages"
    elif wanted is not None and wanted > most:
        why = f"{wanted} tensor ranks are more than the {most} devices of a node"
    else:
        return
    raise _not_fused(constraints, why)


def _check_is_fused(found: Planned) -> None:
    """Raise if fused messages are demanded, but the best plan has no messages to fuse."""
    plan, training = found.plan, found.training
    is_wanted = plan.arrangement.compile.fuses_messages
    if is_wanted and not seconds_saved_by_fusing(plan, training.axes, training.layers):
        why = "in the best layouts, none is next to a matrix product of compiled layers"
        raise _not_fused(training.constraints, why)


def _not_fused(constraints: Constraints, why: str) -> InputError:
    declared = next(one for one in reversed(constraints.declared) if one.field == "compile")
    return InputError(
        f"no messages can be fused with products: {why}",
        where=declared.origin,
        expected="GPUs, and two or more tensor ranks in a node that split a sequence",
        fix=f"leave out {declared.text}, or take --compile layers",
    )


def check_float8(cluster: Cluster, constraints: Constraints) -> None:
    """Raise if layers should multiply in float8 on a device without float8 units."""
    wanted, devices = constraints.float8.units, [node.device for node in cluster.nodes]
    without = [one.name for one in devices if wanted and wanted not in dict(one.peaks)]
    if without:
        having = [name for name, one in device_sheet().items() if wanted in dict(one.peaks)]
        raise InputError(
            f"{without[0]} has no units for products in float8, {constraints.float8}",
            where=_declared_float8(constraints).origin,
            expected=f"a device that has them: {', '.join(having)}",
            fix=f"leave out {_declared_float8(constraints).text}, or choose such a device with "
            "--device",
        )


def check_float8_sizes(graph: Graph, layers: Layers, constraints: Constraints) -> None:
    """Raise if layers should multiply in float8, but no weight has a size that the kernels take."""
    float8 = constraints.float8
    if float8 is not Float8.NONE and not float8_linears(graph, layers, float8):
        raise InputError(
            f"no linear layer can multiply in float8, {float8}",
            where=_declared_float8(constraints).origin,
            expected="a trained nn.Linear inside the layers that are compiled, before the last "
            f"one, whose sizes are multiples of {float8.multiple}",
            fix=f"leave out {_declared_float8(constraints).text}",
        )


def _declared_float8(constraints: Constraints) -> Declared:
    return next(one for one in reversed(constraints.declared) if one.field == "float8")


def training_of(traced: TracedModel, demands: PlanDemands) -> Training:
    """Return a traced model with its demands; reject demands that this model cannot meet."""
    graph, model = traced.graph, traced.model
    constraints = with_optimizer(demands.constraints, traced.optimizer)
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    check_names(constraints, graph, axes, layers=len(layers.layers))
    check_tokens(constraints, tokens_per_row=model.tokens_per_row)
    check_float8_sizes(graph, layers, constraints)
    _check_degrees(demands.clusters, constraints, model.batch)
    if constraints.precision.scales_loss:
        _check_constants(graph)
    return Training(
        graph=graph,
        axes=axes,
        layers=layers,
        model=model,
        constraints=constraints,
        measured=demands.measured,
    )


def plan_training(
    training: Training,
    demands: PlanDemands,
    report: Callable[[str], None] = lambda _: None,
    *,
    cache: Cache = NO_CACHE,
    on_search: Callable[[Training], None] = lambda _: None,
    on_found: Callable[[Plan], None] = lambda _: None,
    workers: Idle = idle_cores,
) -> Planned:
    """Find the best plan on each cluster, choose one of them, and keep the answer in the cache.

    If the cache has no answer, `on_search` is called before the search, and `on_found` after it.
    `workers` returns how many other processes may compute prices ahead of the search, by default
    one for each idle core.
    """
    question = _search_question(training, demands)
    known = cache.find(CachedSearch, question)
    found = _planned_before(known, training, demands) if known is not None else None
    if found is None:
        on_search(training)
        prices = Prices(recall=lambda kind, key: cache.find(kind, _prices_key(training, key)))
        found = _searched(training, demands, report, prices, workers)
        on_found(found.plan)
        if _is_final(found, demands):
            cache.keep(_cached(found), question)
        cache.keep_all((one, _prices_key(training, key)) for key, one in prices.grown())
    _check_is_fused(found)
    if demands.constraints.precision.scales_loss:
        _check_means(training.graph, microbatch=found.plan.arrangement.microbatch)
    return found


def _searched(
    training: Training,
    demands: PlanDemands,
    report: Callable[[str], None],
    prices: Prices,
    workers: Idle,
) -> Planned:
    clusters = demands.clusters
    report("searching")
    curve = planned_curve(
        training,
        clusters,
        time_limit_seconds=demands.time_limit_seconds,
        report=report,
        prices=prices,
        workers=workers,
    )
    choice = choose(curve, demands.constraints)
    found, fewer = choice.point.plan, None
    if demands.looks_at_fewer and len(clusters) == 1 and _is_rented(clusters[0], training):
        report("looking at fewer devices")
        fewer = fewer_as_fast(training, clusters[0], found, prices=prices)
    return Planned(training=training, curve=curve, choice=choice, fewer=fewer)


def _prices_key(training: Training, key: LayoutKey | LeastKey) -> tuple[object, ...]:
    """Return the cache key of prices: `key`, and everything else that the prices depend on."""
    asked = training.constraints
    return (*_priced(training), asked.precision, asked.float8, asked.compile, key)


def _priced(training: Training) -> tuple[object, ...]:
    """Return everything that prices depend on, except demands and machines."""
    moments = tuple(one.moments for one in training.graph.parameters)
    return training.model, moments, training.measured


def _search_question(training: Training, demands: PlanDemands) -> tuple[object, ...]:
    """Return everything that the result of a search depends on, except a time limit."""
    return (
        *_priced(training),
        training.constraints,
        demands.looks_at_fewer,
        tuple(map(cluster_document, demands.clusters)),
    )


def _is_final(found: Planned, demands: PlanDemands) -> bool:
    """Whether a longer search would find the same: no search was ended by the time limit."""
    plans = [trial.plan for trial in found.curve.trials]
    return all(
        demands.time_limit_seconds is None if plan is None else plan.proof.is_complete
        for plan in plans
    )


def _cached(found: Planned) -> CachedSearch:
    trials = (
        CachedTrial(
            devices=one.devices,
            plan=None if one.plan is None else plan_text(one.plan),
            refusal=one.refusal,
        )
        for one in found.curve.trials
    )
    fewer = found.fewer
    return CachedSearch(
        trials=tuple(trials),
        fewer=None if fewer is None else (fewer.devices, fewer.step_seconds),
    )


def _planned_before(
    known: CachedSearch, training: Training, demands: PlanDemands
) -> Planned | None:
    """Return the result of an earlier search; None if this autopar cannot read it."""
    trials = []
    for one in known.trials:
        try:
            plan = None if one.plan is None else parse_plan(one.plan, where="the cache")
        except InputError:
            return None
        whole = None if plan is None else with_graph(plan, training.graph)
        trials.append(Trial(devices=one.devices, plan=whole, refusal=one.refusal))
    constraints = with_batch(training.constraints, demands.clusters[-1], training.graph)
    curve = curve_of(trials, constraints)
    fewer = None
    if known.fewer is not None:
        devices, seconds = known.fewer
        fewer = Fewer(devices=devices, step_seconds=seconds)
    return Planned(
        training=training,
        curve=curve,
        choice=choose(curve, demands.constraints),
        fewer=fewer,
        is_from_cache=True,
    )


def _check_degrees(
    clusters: Sequence[Cluster], constraints: Constraints, batch: BatchFacts
) -> None:
    """Reject constraints that leave no possible degrees on any cluster."""
    *fewer, last = (cluster.size for cluster in clusters)
    if not any(allow_degrees(constraints.declared, size, batch) for size in fewer):
        check_degrees(last, constraints, batch)


def _is_rented(cluster: Cluster, training: Training) -> bool:
    """Whether planning for fewer devices can save money.

    CPUs are for tests and cost nothing. If the objective is the least memory, money does not
    matter.
    """
    is_cpu = any(node.device.is_cpu for node in cluster.nodes)
    return not is_cpu and not training.constraints.objective.memory_alone


_GREATEST = 65_504  # the largest number of fp16
_VALUES = ("value", "fill_value")


def _check_constants(graph: Graph) -> None:
    """Raise if a tensor in the model's dtype is filled with a number beyond fp16."""
    for op in graph.ops:
        if kind_of(op) is OpKind.FILL and _is_narrow(op, graph):
            for key, value in op.arguments:
                if key in _VALUES and _overflows(value):
                    raise InputError(
                        f"{value:g} does not fit fp16, which ends at {_GREATEST:,}",
                        where=op.location,
                        fix='write float("-inf") or torch.finfo(x.dtype).min, or plan in bf16',
                    )


def _check_means(graph: Graph, *, microbatch: int) -> None:
    """Raise if a loss averages over more targets than fp16 can count: its gradient would be 0.

    torch divides by the number of targets in the logits' dtype. The model file's loss function gets
    float32 logits, but a loss that the model computes itself may get fp16 logits.
    """
    for op in graph.ops:
        if kind_of(op).is_class_loss and _is_narrow(op, graph):
            target = op.inputs[1]
            count = graph.tensors[target].numel.at(microbatch)
            if count > _GREATEST:
                raise InputError(
                    f"the loss is a mean over {count:,} targets of a microbatch of {microbatch} "
                    f"rows, and fp16 counts to {_GREATEST:,}",
                    where=op.location,
                    fix="compute the loss from logits.float(), pin a smaller microbatch, or plan "
                    "in bf16",
                )


def _is_narrow(op: Op, graph: Graph) -> bool:
    return graph.tensors[op.outputs[0]].dtype == MODEL_DTYPE


def _overflows(value: object) -> bool:
    if not isinstance(value, (int, float)) or abs(value) in MODEL_EXTREMES:
        return False
    return isfinite(value) and abs(value) > _GREATEST
