"""The least that the layers of a model can take at a tensor degree, before layouts are chosen."""

from __future__ import annotations

from autopar.planner.costs.op_shapes import OpSplit
from autopar.planner.costs.ops import Pricer
from autopar.planner.graph import Op
from autopar.planner.layers import Layers
from autopar.planner.layouts import OpLayout
from autopar.planner.programs.layout_rules import LayoutRules, permitted
from autopar.planner.programs.strategies import strategies


def least_layers_seconds(
    pricer: Pricer, layers: Layers, *, tensor: int, rules: LayoutRules
) -> float:
    """Return Σ over layers of the time when every op is split in its fastest way, for nothing."""
    total = 0.0
    for layer_class in layers.classes:
        ops = layers.layers[layer_class.layers[0]].ops
        least = [_least(op, pricer, tensor, rules) for op in ops]
        forward = pricer.host.forward_region_seconds(sum(f for f, _ in least), len(ops))
        gradients = sum(backward > 0 for _, backward in least)
        backward = pricer.host.backward_region_seconds(sum(b for _, b in least), gradients)
        total += len(layer_class.layers) * (forward + backward)
    return total


def _least(op: Op, pricer: Pricer, tensor: int, rules: LayoutRules) -> tuple[float, float]:
    """Return the least forward and the least backward of an op over all its strategies."""
    found = strategies(op, pricer.graph, pricer.axes, degree=tensor, batch=pricer.batch)
    left = permitted(op, found, rules, pricer.graph, pricer.axes)
    splits = dict.fromkeys(_split_of(strategy, tensor) for strategy in left)
    costs = [pricer.cost(op, split) for split in splits]
    return (
        min(cost.forward_seconds for cost in costs),
        min(cost.backward_seconds for cost in costs),
    )


def _split_of(strategy: OpLayout, tensor: int) -> OpSplit | None:
    if not strategy.letter or tensor == 1:
        return None
    return OpSplit(letter=strategy.letter, axis=strategy.axis, degree=tensor)
