"""Turns the stages of one rank into what the rank holds at its peak, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.costs.framework import FrameworkConstants
from autopar.planner.costs.prediction import Arrangement, LayerCost, MemoryPrediction, Zero
from autopar.planner.costs.stage_load import StageLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A stage on its rank, and the microbatches whose activations it holds at once."""

    load: StageLoad
    in_flight: int


def memory_of(
    held: Sequence[Held], arrangement: Arrangement, constants: FrameworkConstants
) -> MemoryPrediction:
    """Return the peak of a rank.

    state        = Σ over its stages, each category divided by the shard ranks where ZeRO says so
    activations  = Σ saved · in flight: every stage at its own peak at once, an upper bound
    transient    = of the layer that needs most
    unsharded    = ZeRO-3: parameters of two neighbours, one computing and one gathered ahead, and
                   the whole gradient of one; ZeRO-2: the gradients of one bucket
    buffers      = the buckets that a reduction fills and sends, one each
    margin       = share · all of these
    """
    loads = [one.load for one in held]
    zero, shard = arrangement.zero, arrangement.shard
    activations = sum(one.load.saved_bytes * one.in_flight for one in held)
    transient = max((load.transient_bytes for load in loads), default=0)
    unsharded = _unsharded_bytes(loads, arrangement)
    parameters, gradients, optimizer = _state(loads, zero, shard)
    buckets = _bucket_bytes(loads, arrangement)
    everything = parameters + gradients + optimizer + activations + transient + unsharded + buckets
    return MemoryPrediction(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        activation_bytes=activations,
        transient_bytes=transient,
        unsharded_bytes=unsharded,
        communication_bytes=buckets,
        margin_bytes=round(constants.margin * everything),
        context_bytes=context_bytes(arrangement, constants),
    )


def context_bytes(arrangement: Arrangement, constants: FrameworkConstants) -> int:
    """Return what libraries take on each rank, whatever it holds."""
    return constants.context_bytes + constants.communicator_bytes * _communicators(arrangement)


def layer_state_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return what a layer's parameters occupy on a rank, divided as ZeRO divides them."""
    zero, shard = arrangement.zero, arrangement.shard
    return (
        _part(cost.parameter_bytes, shard, zero >= Zero.PARAMETERS)
        + _part(cost.gradient_bytes, shard, zero >= Zero.GRADIENTS)
        + _part(cost.optimizer_bytes, shard, zero >= Zero.OPTIMIZER)
    )


def layer_unsharded_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return what a stage holds unsharded at least, because this layer is in it."""
    if arrangement.shard == 1 or arrangement.zero < Zero.GRADIENTS:
        return 0
    gathered = cost.parameter_bytes if arrangement.zero is Zero.PARAMETERS else 0
    return gathered + cost.gradient_bytes


def _state(loads: Sequence[StageLoad], zero: Zero, shard: int) -> tuple[int, int, int]:
    """Return parameters, gradients and optimizer state, divided as far as ZeRO does."""
    return (
        _part(sum(load.parameter_bytes for load in loads), shard, zero >= Zero.PARAMETERS),
        _part(sum(load.gradient_bytes for load in loads), shard, zero >= Zero.GRADIENTS),
        _part(sum(load.optimizer_bytes for load in loads), shard, zero >= Zero.OPTIMIZER),
    )


def _part(size_bytes: int, ranks: int, is_divided: bool) -> int:
    return -(-size_bytes // ranks) if is_divided else size_bytes


def _unsharded_bytes(loads: Sequence[StageLoad], arrangement: Arrangement) -> int:
    if arrangement.shard == 1 or not loads:
        return 0
    if arrangement.zero is Zero.PARAMETERS:
        return max(sum(load.unit_bytes) for load in loads)
    if arrangement.zero is Zero.GRADIENTS:
        whole = sum(load.gradient_bytes for load in loads)
        return min(whole, max(arrangement.bucket_bytes, max(load.unit_bytes[1] for load in loads)))
    return 0


def _bucket_bytes(loads: Sequence[StageLoad], arrangement: Arrangement) -> int:
    """Return the buckets of ZeRO-0 and 1; those of 0 are where the gradients lie anyway."""
    if arrangement.data == 1 or arrangement.zero is not Zero.OPTIMIZER:
        return 0
    whole = sum(load.gradient_bytes for load in loads)
    return min(whole, arrangement.bucket_bytes) if arrangement.bucket_bytes < whole else 0


def _communicators(arrangement: Arrangement) -> int:
    """Return how many groups a rank is in: the world, and each axis that has several ranks."""
    axes = (arrangement.pipeline, arrangement.data, arrangement.tensor)
    is_mixed = 1 < arrangement.shard < arrangement.data
    return (arrangement.ranks > 1) + sum(degree > 1 for degree in axes) + is_mixed
