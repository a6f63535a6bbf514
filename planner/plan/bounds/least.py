"""Lower bounds of the times of a model's layers, before layouts and stages are chosen.

The time for recomputation has a lower bound, too. Rank r saves the tensors of K_r microbatches
and holds the state of its layers within M bytes, so

    Σ_r A_r  ≤  Σ_r (M − S_r) / K_r  ≤  Σ_r M / K_r  −  S / max K

where one microbatch saves A_r bytes on rank r, the rank's state has S_r bytes, and S = Σ S_r.
However layers are divided into stages, together they must save no more than that. The cheapest way
is to recompute layers in order of price per byte, the last one in part (a fractional knapsack).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from autopar.planner.costs.ops.case import split_of
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import ScheduleKind, in_flight, rank_of
from autopar.planner.costs.steps.step import pipeline_shape
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Layers
from autopar.planner.plan.bounds.bottleneck import free_bottleneck_seconds
from autopar.planner.plan.solving.prices import LeastLayer
from autopar.planner.programs.layouts.rules import LayoutRules, permitted
from autopar.planner.programs.layouts.strategies import Ways

_DIVIDED = (  # a layout divides these at most by the tensor degree
    *("saved_bytes", "transient_bytes", "learning_bytes", "early_gradient_bytes"),
    *("deferred_bytes", "output_bytes"),
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "parameters", "trainable"),
)


Own = TypeVar("Own")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSaving:
    """A step to more recomputation: the saved bytes that it frees, and the seconds it takes."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The bytes that a microbatch saves without recomputation, and steps that reduce them.

    The cheapest steps come first. `transient_bytes` is the most that a layer needs while it runs,
    besides saved tensors, if each layer has the mode that needs least. `last_transient_bytes` is
    the need of the last layer, whose backward is the first, before any saved tensor is freed.
    """

    saved_bytes: int
    savings: tuple[RecomputeSaving, ...]
    transient_bytes: int
    last_transient_bytes: int


def ladder(rows: Sequence[Modes]) -> Ladder:
    """Return the ladder of a row of layers."""
    saved, transient, last, savings = 0, 0, 0, []
    for _, group in groupby(rows, key=id):
        alike = list(group)
        modes = alike[0]
        saved += len(alike) * modes[Recompute.NONE].saved_bytes
        last = min(c.transient_bytes for c in modes.values())
        transient = max(transient, last)
        savings += [
            RecomputeSaving(
                size_bytes=len(alike) * one.size_bytes, seconds=len(alike) * one.seconds
            )
            for one in _hull(modes)
        ]
    cheapest = sorted(savings, key=lambda one: one.seconds / one.size_bytes)
    return Ladder(
        saved_bytes=saved,
        savings=tuple(cheapest),
        transient_bytes=transient,
        last_transient_bytes=last,
    )


def lightest(rows: Sequence[Sequence[Modes]]) -> tuple[Modes, ...]:
    """Return each layer's minimum over all kinds of devices; equal layers stay one object."""
    if len(rows) == 1:
        return tuple(rows[0])
    known: dict[tuple[int, ...], Modes] = {}
    least = []
    for alternatives in zip(*rows, strict=True):
        key = tuple(map(id, alternatives))
        if key not in known:
            known[key] = {mode: _lightest(mode, alternatives) for mode in alternatives[0]}
        least.append(known[key])
    return tuple(least)


def _lightest(mode: Recompute, alternatives: Sequence[Modes]) -> LayerCost:
    plain = [modes[Recompute.NONE].backward_seconds for modes in alternatives]
    own = [modes[mode] for modes in alternatives]
    again = min(one.backward_seconds - base for one, base in zip(own, plain, strict=True))
    backward = min(plain) + max(0.0, again)
    inputs = min(one.backward_seconds - one.weight_gradient_seconds for one in own)
    return replace(
        own[0],
        forward_seconds=min(one.forward_seconds for one in own),
        backward_seconds=backward,
        weight_gradient_seconds=max(0.0, backward - inputs),
        saved_bytes=min(one.saved_bytes for one in own),
        transient_bytes=min(one.transient_bytes for one in own),
    )


def _hull(modes: Modes) -> Iterator[RecomputeSaving]:
    """Yield steps from saving all to saving least, along the lower hull of time and bytes."""
    here = modes[Recompute.NONE]
    others = [cost for mode, cost in modes.items() if mode is not Recompute.NONE]
    while True:
        lower = [cost for cost in others if cost.saved_bytes < here.saved_bytes]
        if not lower:
            return
        best = min(
            lower,
            key=lambda cost: (
                (cost.backward_seconds - here.backward_seconds)
                / (here.saved_bytes - cost.saved_bytes)
            ),
        )
        seconds = max(0.0, best.backward_seconds - here.backward_seconds)
        yield RecomputeSaving(size_bytes=here.saved_bytes - best.saved_bytes, seconds=seconds)
        here = best


def least_recompute_seconds(steps: Ladder, budget_bytes: float) -> float:
    """Return the least recompute time to meet a budget; infinite if impossible."""
    over = steps.saved_bytes - budget_bytes
    total = 0.0
    for saving in steps.savings:
        if over <= 0:
            return total
        share = min(1.0, over / saving.size_bytes)
        total += share * saving.seconds
        over -= share * saving.size_bytes
    return total if over <= 0 else float("inf")


def activation_budget_bytes(
    arrangement: Arrangement, *, rank_bytes: float, state_bytes: float
) -> float:
    """Return how much one microbatch may save over all layers (see the top of the file)."""
    in_flight = in_flight_by_rank(arrangement)
    return sum(rank_bytes / count for count in in_flight) - state_bytes / max(in_flight)


def in_flight_by_rank(arrangement: Arrangement) -> tuple[int, ...]:
    """Return each rank's minimum of microbatches in flight over its stages."""
    return _in_flight_by_rank(arrangement.schedule, pipeline_shape(arrangement))


@lru_cache(maxsize=4096)
def _in_flight_by_rank(schedule: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    least: dict[int, int] = {}
    for stage, count in enumerate(in_flight(schedule, shape)):
        rank = rank_of(schedule, stage, shape.ranks)
        least[rank] = min(count, least.get(rank, count))
    return tuple(least.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLayers:
    """Least seconds of a microbatch's forward and backward in each layer.

    `seconds` is for each of the `count` layers of the largest class, `others` for each other layer.
    `through_seconds` is the time of a microbatch through all layers and back, without weight
    gradients.
    """

    count: int
    seconds: float
    others: tuple[float, ...]
    through_seconds: float
    classes: tuple[LeastLayer, ...]

    @property
    def total_seconds(self) -> float:
        """The seconds of all layers."""
        return self.count * self.seconds + sum(self.others)

    def bottleneck_seconds(self, ranks: int) -> float:
        """Return the least time of the slowest rank for its layers."""
        if ranks == 1:
            return self.total_seconds
        return free_bottleneck_seconds(self.count, self.seconds, self.others, ranks=ranks)


def least_of_all(kinds: Sequence[Sequence[LeastLayer]]) -> tuple[LeastLayer, ...]:
    """Return each class's minima over several devices."""
    names = [one.name for one in fields(LeastLayer)]
    return tuple(
        LeastLayer(**{name: min(getattr(one, name) for one in alternatives) for name in names})
        for alternatives in zip(*kinds, strict=True)
    )


def least_classes(
    pricer: OpPricer,
    layers: Layers,
    *,
    tensor: int,
    rules: LayoutRules,
    ways: dict[str, Ways],
) -> tuple[LeastLayer, ...]:
    """Return the least times of a layer of each class: every op has its fastest split.

    Communication is free. `ways` caches the strategies of ops.
    """
    classes: list[LeastLayer] = []
    for layer_class in layers.classes:
        ops = layers.layers[layer_class.layers[0]].ops
        for op in ops:
            if op.name not in ways:
                ways[op.name] = Ways.of(op, pricer.graph, pricer.axes)
        least = [_least(op, pricer, tensor, rules, ways[op.name]) for op in ops]
        alone = sum(f for f, _, _ in least)
        forwards, gradients = map(sum, zip(*map(pricer.launches, ops), strict=True))
        forward = pricer.host.forward_region_seconds(alone, forwards)
        backward = pricer.host.backward_region_seconds(sum(b for _, b, _ in least), gradients)
        classes.append(
            LeastLayer(
                alone_seconds=alone,
                forward_seconds=forward,
                backward_seconds=backward,
                input_gradient_seconds=sum(inputs for _, _, inputs in least),
            )
        )
    return tuple(classes)


def least_layers(classes: tuple[LeastLayer, ...], layers: Layers) -> LeastLayers:
    """Return the times of all layers, from those of a layer in each class."""
    each: list[tuple[int, float]] = []
    through = 0.0
    for layer_class, one in zip(layers.classes, classes, strict=True):
        count = len(layer_class.layers)
        each.append((count, one.forward_seconds + one.backward_seconds))
        through += count * (one.alone_seconds + one.input_gradient_seconds)
    most = max(range(len(each)), key=lambda place: each[place][0])
    rest = [pair for place, pair in enumerate(each) if place != most]
    return LeastLayers(
        count=each[most][0],
        seconds=each[most][1],
        others=tuple(seconds for count, seconds in rest for _ in range(count)),
        through_seconds=through,
        classes=classes,
    )


def _least(
    op: Op, pricer: OpPricer, tensor: int, rules: LayoutRules, ways: Ways
) -> tuple[float, float, float]:
    """Return an op's least seconds of forward, backward and input gradient over all strategies."""
    found = ways.over(degree=tensor, batch=pricer.batch)
    left = permitted(op, found, rules, pricer.graph, pricer.axes)
    splits = dict.fromkeys(split_of(strategy, tensor) for strategy in left)
    costs = [pricer.cost(op, split) for split in splits]
    return (
        min(cost.forward_seconds for cost in costs),
        min(cost.backward_seconds for cost in costs),
        min(cost.backward_seconds - cost.weight_gradient_seconds for cost in costs),
    )


def of_any(fastest: Sequence[Modes], unsplit: Sequence[Modes], *, degree: int) -> tuple[Modes, ...]:
    """Return lower bounds of each layer over all layouts, from the fastest and unsplit ones."""

    def bound(own: Modes, whole: Modes) -> Modes:
        return {mode: _at_least(mode, own, whole, degree) for mode in own}

    return _each(fastest, unsplit, bound)


def of_least(
    least: Sequence[LeastLayer], unsplit: Sequence[Modes], *, degree: int
) -> tuple[Modes, ...]:
    """Return lower bounds of each layer over all layouts, before any of them is solved."""

    def bound(own: LeastLayer, whole: Modes) -> Modes:
        return {mode: _from_unsplit(mode, own, whole, degree) for mode in whole}

    return _each(least, unsplit, bound)


def _each(
    own: Sequence[Own], unsplit: Sequence[Modes], bound: Callable[[Own, Modes], Modes]
) -> tuple[Modes, ...]:
    """Return the bound of each layer; equal layers stay one object."""
    known: dict[tuple[int, int], Modes] = {}
    for one, whole in zip(own, unsplit, strict=True):
        if (id(one), id(whole)) not in known:
            known[id(one), id(whole)] = bound(one, whole)
    return tuple(known[id(one), id(whole)] for one, whole in zip(own, unsplit, strict=True))


def _from_unsplit(mode: Recompute, least: LeastLayer, unsplit: Modes, degree: int) -> LayerCost:
    whole, plain = unsplit[mode], unsplit[Recompute.NONE]
    again = _again_seconds(mode, unsplit) / degree
    share = least.forward_seconds * degree / plain.forward_seconds if plain.forward_seconds else 1.0
    backward = least.backward_seconds + max(0.0, again) * min(1.0, share)
    return replace(
        whole,
        forward_seconds=least.forward_seconds,
        backward_seconds=backward,
        weight_gradient_seconds=max(0.0, backward - least.input_gradient_seconds),
        **{name: getattr(whole, name) // degree for name in _DIVIDED},
        float8_weights=_most_in_float8(whole, degree),
    )


def _at_least(mode: Recompute, fastest: Modes, unsplit: Modes, degree: int) -> LayerCost:
    own, whole, plain = fastest[mode], unsplit[mode], fastest[Recompute.NONE]
    again = min(_again_seconds(mode, fastest), _again_seconds(mode, unsplit) / degree)
    return replace(
        own,
        backward_seconds=plain.backward_seconds + max(0.0, again),
        **{name: min(getattr(own, name), getattr(whole, name) // degree) for name in _DIVIDED},
        float8_weights=_most_in_float8(whole, degree),
    )


def _most_in_float8(whole: LayerCost, degree: int) -> tuple[tuple[int, int], ...]:
    """Return the most elements that are gathered in float8 (1 byte, not 2) in any layouts.

    Which products are in float8 depends on the layouts, so those of the fastest are no bound. The
    elements are returned as one weight with 0 rows, because any number of ranks divides 0.
    """
    elements = sum(size for _, size in whole.float8_weights)
    return ((0, min(elements, whole.parameter_bytes // degree // 2)),)


def _again_seconds(mode: Recompute, modes: Modes) -> float:
    """Return the seconds of recomputation in a mode.

    Waits for copies from the host are left out, because slower layouts may wait less.
    """
    own, plain = modes[mode], modes[Recompute.NONE]
    return own.backward_seconds - own.host_wait_seconds - plain.backward_seconds
