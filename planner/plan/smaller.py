"""Turns a plan into the constraints that a smaller model of the same kind is planned under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.planner.axes.infer import Axes
from autopar.planner.costs.prediction import Recompute
from autopar.planner.layers import Layers
from autopar.planner.plan.declared.constraints import (
    Constraints,
    Declared,
    RecomputePin,
    SplitRule,
    constraints_of,
)
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import Plan

ORIGIN = "the plan"
_ROWS = 2  # at most in a microbatch, but one for each tensor rank where these may share them
_TURNS = 2  # of the pipeline, at most, in a step


def arrangement_constraints(plan: Plan) -> Constraints:
    """Return all of a plan but the insides of layers: its degrees, and a batch as small as shows.

    A step keeps the order of forwards and backwards, with fewer microbatches of fewer rows.
    """
    return constraints_of(_arrangement(plan))


def whole_constraints(plan: Plan, axes: Axes, layers: Layers) -> Constraints:
    """Return also how modules are split and recomputed, where they are so in all equal layers."""
    rules = [*_splits(plan, axes, layers), *_recompute(plan, layers)]
    return constraints_of([*_arrangement(plan), *rules])


def _arrangement(plan: Plan) -> Iterator[Declared]:
    arranged, fixed = plan.arrangement, plan.graph.fixed_batch
    is_whole = arranged.data * arranged.microbatches == 1
    most = max(_ROWS, arranged.tensor) if is_whole else _ROWS
    rows = arranged.microbatch if fixed is not None else min(arranged.microbatch, most)
    count = min(arranged.microbatches, _TURNS * arranged.pipeline)
    block = rows * arranged.data
    if arranged.rows:  # one row more than data ranks: the first has two
        rows, block = 2, arranged.data + 1
        count += count % arranged.data == 0  # else they could be shared out evenly
    places: dict[str, object] = {
        "precision": arranged.precision.value,
        "global_batch": count * block,
        "pins.pp": arranged.pipeline,
        "pins.dp": arranged.data,
        "pins.tp": arranged.tensor,
        "pins.shard": arranged.shard,
        "pins.microbatch": rows,
        "pins.zero": arranged.zero.value,
        "choices.compressed_gradients": arranged.compressed_gradients,
    }
    if arranged.pipeline > 1:
        places["pins.stages_per_rank"] = arranged.stages_per_rank
        places["pins.schedule"] = arranged.schedule.value
    for place, value in places.items():
        yield declare(place, value, origin=ORIGIN, where=place)


def _splits(plan: Plan, axes: Axes, layers: Layers) -> Iterator[Declared]:
    """Yield an axis for each module whose own ops are split along that one alone.

    Of rules that mean one op the first holds, so those of inner modules come first.
    """
    if plan.arrangement.tensor == 1:
        return
    found: dict[str, set[str]] = {}
    for layer in layers.layers:
        for op, layout in zip(layer.ops, plan.layouts[layer.layer_class], strict=True):
            if layout.axis:
                found.setdefault(_in_all(op.call, plan), set()).add(axes.names[layout.axis])
    inner_first = sorted(found.items(), key=lambda one: -one[0].count("."))
    clear = [(path, *along) for path, along in inner_first if path and len(along) == 1]
    for number, (path, axis) in enumerate(clear, start=1):
        if not axis.isdigit():
            rule = SplitRule(modules=path, axis=axis, is_required=True)
            yield _rule("splits", number, rule, f"split {axis} in {path}")


def _recompute(plan: Plan, layers: Layers) -> Iterator[Declared]:
    """Yield for the layers of each list the way in which most of them are recomputed."""
    modes: dict[str, Counter[Recompute]] = {}
    for layer, mode in zip(layers.layers, plan.layer_modes, strict=True):
        modes.setdefault(_in_all(layer.call, plan) or "*", Counter())[mode] += 1
    every = {"*": Recompute.NONE} | {
        path: most.most_common(1)[0][0] for path, most in modes.items()
    }
    for number, (path, mode) in enumerate(every.items(), start=1):
        rule = RecomputePin(modules=path, mode=mode)
        yield _rule("recompute", number, rule, f"recompute {mode} in {path}")


def _rule(field: str, number: int, value: SplitRule | RecomputePin, text: str) -> Declared:
    return Declared(place=f"{field} {number}", field=field, value=value, text=text, origin=ORIGIN)


def _in_all(call: str, plan: Plan) -> str:
    """Return the pattern of a call's module in all layers of its list: "h.*.mlp" for "h.3.mlp".

    The loss function is in no module: "".
    """
    path = plan.graph.calls[call].path if call in plan.graph.calls else ""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
