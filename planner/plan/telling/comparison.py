"""Compares two plans; predicts the time that compiling, fusing, float8 or other sizes save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from autopar.planner.axes.infer import GraphAxes
from autopar.planner.cluster.cluster import Device
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.layers.flow import LayerFlow, layer_flow
from autopar.planner.costs.ops.case import products_of
from autopar.planner.costs.ops.measurements import OpCost
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Compile, Layers
from autopar.planner.plan.plan import ClassLayouts, Plan, PlannedStage, StoredPlan
from autopar.planner.plan.telling.explanation import (
    MEMORY_CATEGORIES,
    StepPart,
    part_seconds,
)
from autopar.planner.plan.telling.words import (
    local_words,
    recompute_words,
    schedule_words,
    unit_word,
    units_per_second,
)
from autopar.planner.precision import Float8, Precision
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A difference between the plans, in words."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """A figure of both plans; `unit` is "s", "B", "1/s", "USD" or "" for a fraction."""

    name: str
    unit: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Everything that `autopar diff` prints."""

    warnings: tuple[str, ...]
    changes: tuple[Change, ...]
    layouts: tuple[Change, ...]
    figures: tuple[ComparedFigure, ...]


def compare(before: StoredPlan, after: StoredPlan) -> PlanComparison:
    """Return the differences between two plans."""
    return PlanComparison(
        warnings=tuple(_warnings(before, after)),
        changes=tuple(_changes(before, after)),
        layouts=tuple(_layout_changes(before.classes, after.classes)),
        figures=tuple(_figures(before, after)),
    )


def _warnings(before: StoredPlan, after: StoredPlan) -> Iterator[str]:
    if before.model.graph_hash != after.model.graph_hash:
        yield f"the models differ: {before.model.name} and {after.model.name}"
    elif before.model.source_hash != after.model.source_hash:
        yield "the model file changed between the plans, though not what it computes"
    if before.machines.content_hash != after.machines.content_hash:
        yield f"the machines differ: {_machines(before)} and {_machines(after)}"
    if before.arrangement.global_batch != after.arrangement.global_batch:
        yield (
            f"the global batches differ ({before.arrangement.global_batch} and "
            f"{after.arrangement.global_batch} rows): compare throughput, not the step"
        )
    if before.autopar != after.autopar:
        yield f"autopar {before.autopar} and {after.autopar} may predict differently"


def _machines(plan: StoredPlan) -> str:
    return f"{plan.machines.devices} × {plan.machines.device}"


def _changes(before: StoredPlan, after: StoredPlan) -> Iterator[Change]:
    one, other = before.arrangement, after.arrangement
    rows = (
        ("pipeline (pp)", one.pipeline, other.pipeline),
        ("data (dp)", one.data, other.data),
        ("tensor (tp)", one.tensor, other.tensor),
        ("microbatch", f"{one.microbatch} rows", f"{other.microbatch} rows"),
        ("microbatches", one.microbatches, other.microbatches),
        ("schedule", schedule_words(one) or "none", schedule_words(other) or "none"),
        ("ZeRO", one.zero.value, other.zero.value),
        ("sharded over", one.shard, other.shard),
        ("local steps", *(local_words(x) for x in (one, other))),
        ("gradient sums", one.compression.sums, other.compression.sums),
        ("bucket", f"{one.bucket_bytes / 2**20:g} MiB", f"{other.bucket_bytes / 2**20:g} MiB"),
        ("precision", one.precision, other.precision),
        ("compiled", one.compile, other.compile),
        ("float8", one.float8, other.float8),
        ("on the host", one.offload, other.offload),
        ("objective", before.objective, after.objective),
        ("recompute", recompute_words(before.stages), recompute_words(after.stages)),
        ("stages", _borders(before.stages), _borders(after.stages)),
        ("constraints", *("; ".join(map(str, one.constraints)) for one in (before, after))),
    )
    for what, old, new in rows:
        if old != new:
            yield Change(what=what, before=str(old) or "none", after=str(new) or "none")


def _borders(stages: tuple[PlannedStage, ...]) -> str:
    """Return the number of layers in each stage: "9 + 8 + 8 + 7 layers"."""
    return " + ".join(str(stage.count) for stage in stages) + " layers"


def _layout_changes(
    before: tuple[ClassLayouts, ...], after: tuple[ClassLayouts, ...]
) -> Iterator[Change]:
    """Yield the modules whose ops the plans split differently; compares classes in order."""
    for one, other in zip_longest(before, after):
        known = one or other
        assert known is not None
        mine, theirs = _modules(one), _modules(other)
        for module in dict.fromkeys((*mine, *theirs)):
            old, new = mine.get(module, "not split"), theirs.get(module, "not split")
            if old != new:
                yield Change(what=f"{known.name}.{module}".rstrip("."), before=old, after=new)


def _modules(one: ClassLayouts | None) -> dict[str, str]:
    """Return words on the split of each module of a class, by the module's name."""
    axes: dict[str, list[str]] = {}
    for line in one.splits if one is not None else ():
        axes.setdefault(line.module, []).append(line.axis)
    return {m: f"split along {', '.join(dict.fromkeys(a))}" for m, a in axes.items()}


def _figures(before: StoredPlan, after: StoredPlan) -> Iterator[ComparedFigure]:
    plans = (before, after)
    predictions = [plan.prediction for plan in plans]

    def figure(name: str, unit: str, values: list[float]) -> ComparedFigure:
        return ComparedFigure(name=name, unit=unit, before=values[0], after=values[1])

    yield figure("step", "s", [one.step_seconds for one in predictions])
    for part in StepPart:
        yield figure(f"  {part}", "s", [part_seconds(one, part) for one in predictions])
    rates = [units_per_second(p.arrangement, p.model, p.prediction.step_seconds) for p in plans]
    yield figure("throughput", "1/s", rates)
    prices = [plan.machines.usd_per_hour for plan in plans]
    costs = [price / 3600 / rate * 1e6 for price, rate in zip(prices, rates, strict=True) if price]
    if len(costs) == len(plans):
        yield figure(f"price of a million {unit_word(after.model)}", "USD", costs)
    yield figure("MFU", "", [one.mfu for one in predictions])
    yield figure("memory", "B", [one.peak_memory.device_bytes for one in predictions])
    for name, field in MEMORY_CATEGORIES:
        yield figure(f"  {name}", "B", [getattr(one.peak_memory, field) for one in predictions])
    for reason in dict.fromkeys(term.reason for one in predictions for term in one.communication):
        seconds = [
            sum(term.seconds for term in one.communication if term.reason == reason)
            for one in predictions
        ]
        yield figure(reason, "s", seconds)


def seconds_saved_by_compiling(plan: Plan, axes: GraphAxes, layers: Layers) -> float:
    """Return about how many seconds compiled layers save in a step, in the plan's layouts."""
    return _seconds_saved(plan, axes, layers, replace(plan.arrangement, compile=Compile.NONE))


def seconds_saved_by_float8(plan: Plan, axes: GraphAxes, layers: Layers) -> float:
    """Return about how many seconds float8 products save in a step; negative if they cost some."""
    return _seconds_saved(plan, axes, layers, replace(plan.arrangement, float8=Float8.NONE))


def seconds_saved_by_fusing(plan: Plan, axes: GraphAxes, layers: Layers) -> float:
    """Return about how many seconds messages that are fused with products save in a step."""
    return _seconds_saved(plan, axes, layers, replace(plan.arrangement, compile=Compile.LAYERS))


def _seconds_saved(plan: Plan, axes: GraphAxes, layers: Layers, without: Arrangement) -> float:
    """Return how much longer a step would be in the arrangement `without`, in the same layouts.

    Counts forward and backward on a device, evenly spread over the stages, without recomputation.
    """
    arrangement = plan.arrangement
    other, own = (
        OpPricer(
            plan.graph,
            axes,
            batch=arrangement.microbatch,
            precision=arrangement.precision,
            device=plan.cluster.nodes[0].device,
            layers=layers,
            compile_=one.compile,
            float8=one.float8,
        )
        for one in (without, arrangement)
    )
    saved = 0.0
    shape = group_shape(plan.cluster, arrangement.tensor, 1)
    parameters, outside = (
        {one.name: one.layout for one in named} for named in (plan.parameters, plan.crossing)
    )
    for known, layouts in zip(layers.classes, plan.layouts, strict=True):
        before, after = (
            layer_flow(
                pricer, layers.layers[known.layers[0]], layouts, degree=arrangement.tensor,
                shape=shape, parameters=parameters, outside=outside,
            )
            for pricer in (other, own)
        )  # fmt: skip
        saved += (_seconds_of(before) - _seconds_of(after)) * len(known.layers)
    return saved * arrangement.microbatches / arrangement.pipeline


def _seconds_of(flow: LayerFlow) -> float:
    """Return the device's seconds of a layer's ops and conversions, forward and backward."""
    ops = sum(one.cost.forward_seconds + one.cost.backward_seconds for one in flow.ops)
    costs = (one.cost for one in flow.conversions)
    return ops + sum(one.forward_seconds + one.backward_seconds for one in costs)


SLOW = 0.02  # the share of a microbatch's seconds from which lost time matters
LEAST_LOSS_SECONDS = 1e-3  # less lost time per microbatch does not matter: the model is small
_ALIGNED = 8  # elements of 16 bits, which take 16 bytes
_PADDED = 64  # elements: a multiple of it fills whole tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaligned:
    """A size in matrix products that is no multiple of 16 bytes; all seconds are per microbatch."""

    size: int
    location: str
    seconds: float  # of the products
    aligned_seconds: float  # of the same products, if the size were a multiple
    total_seconds: float  # of all ops, on one device

    @property
    def padded(self) -> int:
        """The next size with fast products."""
        return -(-self.size // _PADDED) * _PADDED


def unaligned(
    graph: Graph, axes: GraphAxes, *, batch: int, precision: Precision, device: Device
) -> Unaligned | None:
    """Return the size that slows down 16-bit products most on a GPU, if that matters."""
    if not precision.is_half or device.is_cpu:
        return None
    prices, aligned = (
        OpPricer(graph, axes, batch=batch, precision=precision, device=device) for _ in range(2)
    )
    rates = aligned.rates
    aligned.rates = replace(rates, own=replace(rates.own, alignment=((1, 1.0),)))
    total, found = 0.0, dict[int, Unaligned]()
    for op in graph.ops:
        seconds = _seconds(prices.cost(op))
        total += seconds
        size = _unaligned_size(op, prices)
        if size and (could := _seconds(aligned.cost(op))) < seconds:
            one = found.get(size) or Unaligned(
                size=size, location=op.location, seconds=0.0, aligned_seconds=0.0, total_seconds=0.0
            )
            found[size] = replace(
                one, seconds=one.seconds + seconds, aligned_seconds=one.aligned_seconds + could
            )
    worst = max(found.values(), key=lambda one: one.seconds - one.aligned_seconds, default=None)
    lost = 0.0 if worst is None else worst.seconds - worst.aligned_seconds
    if worst is None or lost < max(LEAST_LOSS_SECONDS, SLOW * total):
        return None
    return replace(worst, total_seconds=total)


def _seconds(cost: OpCost) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _unaligned_size(op: Op, prices: OpPricer) -> int:
    """Return the largest contiguous extent of an op's products that is not aligned, or 0."""
    rule = rule_of(op.target)
    if not rule.factors or rule.kind is not OpKind.OTHER:
        return 0
    products = products_of(op, prices.shapes(op))
    extents = (extent for product in products for extent in (product.n, product.k))
    return max((extent for extent in extents if extent % _ALIGNED), default=0)
