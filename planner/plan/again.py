"""Plans a training again: on other devices, for a smaller model, or with other pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.cluster import Cluster, cluster_from
from autopar.planner.cluster.sheet import known_fabrics
from autopar.planner.costs.ops.measurements import Measurements
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InfeasibleError, InputError, TimeLimitError, gathered
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import Layers, find_layers
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    RecomputePin,
    SplitRule,
    constraints_of,
    minimal_conflict,
)
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.files.consistency import layout_faults
from autopar.planner.plan.plan import BatchFacts, Plan, RunnerUp, StoredPlan
from autopar.planner.plan.search.assembly import runner_up
from autopar.planner.plan.search.search import search
from autopar.planner.plan.search.space import STAGES_PER_RANK, allow_degrees, legal_degrees

GraphParts: TypeAlias = tuple[GraphAxes, Layers]


def parts_of(plan: Plan, *, where: str, known: GraphParts | None = None) -> GraphParts:
    """Return a plan's axes and layers; raise one error that lists all faults of its layouts.

    `where` names the plan's file in messages. `known` are the axes and layers of its graph, if they
    have been found before.
    """
    axes, layers = known or graph_parts(plan.graph)
    faults = list(layout_faults(plan, axes, layers))
    if faults:
        raise gathered(faults, where=where, fix="plan again with `autopar plan`")
    return axes, layers


def graph_parts(graph: Graph) -> GraphParts:
    """Return the axes and layers of a graph."""
    axes = infer_axes(graph)
    return axes, find_layers(graph, axes)


TIME_LIMIT_SECONDS = 60.0


def solve_point(
    plan: Plan,
    constraints: Constraints,
    *,
    measured: Measurements | None = None,
    time_limit_seconds: float = TIME_LIMIT_SECONDS,
) -> RunnerUp | str:
    """Return the fastest plan of the training under other constraints, or why there is none."""
    axes = infer_axes(plan.graph)
    try:
        other = search(
            plan.graph,
            axes,
            find_layers(plan.graph, axes),
            plan.model,
            plan.cluster,
            replace(constraints, tolerance=0.0),
            time_limit_seconds=time_limit_seconds,
            measured=measured,
        )
    except (InfeasibleError, TimeLimitError) as error:
        return error.found
    gap = other.proof.gap
    limited = f"the time limit came first: it may be up to {gap:.1%} faster" if gap else ""
    return runner_up(other, limited)


ORIGIN = "the plan"
_ROWS = 2  # the most rows of a microbatch
_TURNS = 2  # microbatches per pipeline rank in a step


def arrangement_constraints(plan: StoredPlan) -> Constraints:
    """Return constraints for a plan's degrees and settings, with the smallest useful batch.

    A step keeps the order of forwards and backwards, with fewer and smaller microbatches.
    """
    return constraints_of(_arrangement(plan))


def whole_constraints(plan: Plan, axes: GraphAxes, layers: Layers) -> Constraints:
    """Return `arrangement_constraints`, and rules for the plan's splits and recompute modes."""
    rules = [*_splits(plan, axes, layers), *_recompute(plan, layers)]
    return constraints_of([*_arrangement(plan), *rules])


def _arrangement(plan: StoredPlan) -> Iterator[Declared]:
    arranged, fixed = plan.arrangement, plan.model.batch.fixed
    is_whole = arranged.data * arranged.microbatches == 1
    most = max(_ROWS, arranged.tensor) if is_whole else _ROWS  # tensor ranks may split whole ones
    rows = arranged.microbatch if fixed is not None else min(arranged.microbatch, most)
    count = min(arranged.microbatches, _TURNS * arranged.pipeline)
    block = rows * arranged.data
    if arranged.rows:  # one row more than data ranks: the first has two
        rows, block = 2, arranged.data + 1
        count += count % arranged.data == 0  # so that the rows cannot be distributed evenly
    places: dict[str, object] = {
        "precision": arranged.precision.value,
        "compile": arranged.compile.value,
        "float8": arranged.float8.value,
        "offload": arranged.offload.value,
        "tolerance": 0,  # the simplest plan of a smaller model may have other layouts
        "global_batch": count * block,
        "pins.pp": arranged.pipeline,
        "pins.dp": arranged.data,
        "pins.tp": arranged.tensor,
        "pins.shard": arranged.shard,
        "pins.microbatch": rows,
        "pins.zero": arranged.zero.value,
        "choices.compressed_gradients": arranged.compression.value,
    }
    if arranged.is_local:
        places["choices.sync_every"] = arranged.sync_every
        places["choices.outer"] = arranged.outer.value
        places["choices.outer_parts"] = arranged.outer_parts
    if arranged.pipeline > 1:
        places["pins.stages_per_rank"] = arranged.stages_per_rank
        places["pins.schedule"] = arranged.schedule.value
    for place, value in places.items():
        yield declare(place, value, origin=ORIGIN, where=place)


def _splits(plan: Plan, axes: GraphAxes, layers: Layers) -> Iterator[Declared]:
    """Yield a split rule for each module whose own ops are split along a single axis.

    The first matching rule of an op applies, so rules of inner modules come first.
    """
    if plan.arrangement.tensor == 1:
        return
    found: dict[str, set[str]] = {}
    for layer in layers.layers:
        for op, layout in zip(layer.ops, plan.layouts[layer.layer_class], strict=True):
            if layout.axis:
                found.setdefault(_pattern(op.call, plan), set()).add(axes.names[layout.axis])
    inner_first = sorted(found.items(), key=lambda one: -one[0].count("."))
    clear = [(path, *along) for path, along in inner_first if path and len(along) == 1]
    for number, (path, axis) in enumerate(clear, start=1):
        if not axis.isdigit():
            rule = SplitRule(modules=path, axis=axis, is_required=True)
            yield _rule("splits", number, rule, f"split {axis} in {path}")


def _recompute(plan: Plan, layers: Layers) -> Iterator[Declared]:
    """Yield a rule for each list of layers ("h.*"), with its most frequent recompute mode."""
    modes: dict[str, Counter[Recompute]] = {}
    for layer, mode in zip(layers.layers, plan.layer_modes, strict=True):
        modes.setdefault(_pattern(layer.call, plan) or "*", Counter())[mode] += 1
    every = {"*": Recompute.NONE} | {
        path: most.most_common(1)[0][0] for path, most in modes.items()
    }
    for number, (path, mode) in enumerate(every.items(), start=1):
        rule = RecomputePin(modules=path, mode=mode)
        yield _rule("recompute", number, rule, f"recompute {mode} in {path}")


def _rule(field: str, number: int, value: SplitRule | RecomputePin, text: str) -> Declared:
    return Declared(place=f"{field} {number}", field=field, value=value, text=text, origin=ORIGIN)


def _pattern(call: str, plan: Plan) -> str:
    """Return the pattern of a call's module in all layers of its list: "h.*.mlp" for "h.3.mlp".

    It is "" for the loss function, which is in no module.
    """
    path = plan.graph.calls[call].path if call in plan.graph.calls else ""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


# Of contradicting demands, the first in this order is dropped. Data ranks come first: another
# number of them computes the same, whereas tensor and pipeline ranks save memory.
_DROPPED = (
    "data",
    "shard",
    "zero_levels",
    "stages_per_rank",
    "stages",
    "microbatch",
    "pipeline",
    "tensor",
)
_OF_A_CHOICE = ("deadline_seconds", "budget_usd")  # demands that choose a number of devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedConstraints:
    """The constraints for another number of devices, and those that were dropped."""

    constraints: Constraints
    dropped: tuple[Declared, ...]


def resized_constraints(plan: StoredPlan, devices: int) -> ResizedConstraints:
    """Return a plan's constraints, batch, precision and float8, for another number of devices.

    The deadline and the budget are dropped. Demands that leave no degrees for this number of
    devices are dropped one by one. The search reports any other demand that cannot be met.
    """
    arranged, batch = plan.arrangement, plan.model.batch
    same = {
        "global_batch": arranged.global_batch,
        "precision": arranged.precision.value,
        "float8": arranged.float8.value,
    }
    declared = (
        *plan.constraints,
        *(declare(place, value, origin=ORIGIN, where=place) for place, value in same.items()),
    )

    def is_feasible(some: Sequence[Declared]) -> bool:
        return _leave_a_plan(some, devices, batch)

    dropped = [one for one in declared if one.field in _OF_A_CHOICE]
    while not is_feasible(rest := [one for one in declared if one not in dropped]):
        conflict = minimal_conflict(rest, is_feasible)
        of_degrees = [one for one in conflict if one.field in _DROPPED]
        if not of_degrees:
            break
        dropped.append(min(of_degrees, key=lambda one: _DROPPED.index(one.field)))
    return ResizedConstraints(constraints=constraints_of(rest), dropped=tuple(dropped))


def _leave_a_plan(declared: Sequence[Declared], devices: int, batch: BatchFacts) -> bool:
    """Whether demands leave degrees that allow the demanded ZeRO levels and stages."""
    if not allow_degrees(declared, devices, batch):
        return False
    chosen = constraints_of(declared)
    most = chosen.stages_per_rank or max(STAGES_PER_RANK)
    last = max((pin.stage for pin in chosen.stages), default=0)
    return any(
        (data > 1 or not all(level.divides_optimizer for level in chosen.zero_levels))
        and (pipeline > 1 or chosen.stages_per_rank in (None, 1))
        and last < (pipeline * most if pipeline > 1 else 1)
        for pipeline, data, _ in legal_degrees(devices, chosen, batch)
    )


def machines_like(plan: StoredPlan, devices: int, machines: int = 1) -> Cluster:
    """Return equal machines with `devices` devices in all, of the plan's kind and with its links.

    Several machines for a plan of one are joined by the device's usual network.
    """
    first = plan.cluster.nodes[0]
    if any(replace(node, devices=first.devices) != first for node in plan.cluster.nodes):
        raise InputError(
            "the plan is for unlike machines, and which of them is left is not known",
            fix=f"describe it in a cluster file: autopar plan {plan.model.spec} --cluster FILE …",
        )
    links = {level.name: level.units[0].link for level in plan.cluster.levels}
    return cluster_from(
        [replace(first, devices=devices // machines)] * machines,
        network=links.get("network", known_fabrics()[first.device.fabric]),
        origin=plan.cluster.origin,
    )
