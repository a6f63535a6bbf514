"""The least that the layers of a model can take at a tensor degree, before layouts are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.costs.ops.pricer import Pricer
from autopar.planner.costs.ops.shapes import OpSplit
from autopar.planner.layers import Layers
from autopar.planner.layouts import OpLayout
from autopar.planner.ops import Op
from autopar.planner.plan.bounds.bottleneck import free_bottleneck_seconds
from autopar.planner.programs.layouts.rules import LayoutRules, permitted
from autopar.planner.programs.layouts.strategies import strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLayers:
    """Forward and backward of one microbatch: of one of the layers that repeat, of the others.

    `through_seconds` is what one microbatch needs to pass all layers and come back, its weight
    gradients left for later.
    """

    count: int
    seconds: float
    others: tuple[float, ...]
    through_seconds: float

    @property
    def total_seconds(self) -> float:
        """Of all layers."""
        return self.count * self.seconds + sum(self.others)

    def bottleneck_seconds(self, ranks: int) -> float:
        """Return the least that the slowest of some ranks takes for its layers."""
        if ranks == 1:
            return self.total_seconds
        return free_bottleneck_seconds(self.count, self.seconds, self.others, ranks=ranks)


def least_layers(pricer: Pricer, layers: Layers, *, tensor: int, rules: LayoutRules) -> LeastLayers:
    """Return what the layers take when every op is split in its fastest way, for nothing."""
    each: list[tuple[int, float]] = []
    through = 0.0
    for layer_class in layers.classes:
        ops = layers.layers[layer_class.layers[0]].ops
        least = [_least(op, pricer, tensor, rules) for op in ops]
        alone = sum(f for f, _, _ in least)
        forward = pricer.host.forward_region_seconds(alone, len(ops))
        gradients = sum(backward > 0 for _, backward, _ in least)
        backward = pricer.host.backward_region_seconds(sum(b for _, b, _ in least), gradients)
        through += len(layer_class.layers) * (alone + sum(back for _, _, back in least))
        each.append((len(layer_class.layers), forward + backward))
    most = max(range(len(each)), key=lambda place: each[place][0])
    rest = [pair for place, pair in enumerate(each) if place != most]
    return LeastLayers(
        count=each[most][0],
        seconds=each[most][1],
        others=tuple(seconds for count, seconds in rest for _ in range(count)),
        through_seconds=through,
    )


def _least(op: Op, pricer: Pricer, tensor: int, rules: LayoutRules) -> tuple[float, float, float]:
    """Return an op's least forward, backward and input gradient over all its strategies."""
    found = strategies(op, pricer.graph, pricer.axes, degree=tensor, batch=pricer.batch)
    left = permitted(op, found, rules, pricer.graph, pricer.axes)
    splits = dict.fromkeys(_split_of(strategy, tensor) for strategy in left)
    costs = [pricer.cost(op, split) for split in splits]
    return (
        min(cost.forward_seconds for cost in costs),
        min(cost.backward_seconds for cost in costs),
        min(cost.backward_seconds - cost.weight_gradient_seconds for cost in costs),
    )


def _split_of(strategy: OpLayout, tensor: int) -> OpSplit | None:
    if not strategy.letter or tensor == 1:
        return None
    return OpSplit(letter=strategy.letter, axis=strategy.axis, degree=tensor)
