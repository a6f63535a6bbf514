"""Turns the stages of one rank into what the rank holds at its peak, by category."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.costs.prediction import Arrangement, LayerCost, MemoryPrediction, Zero
from autopar.planner.costs.schedules.moments import Moments
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.stage_load import StageLoad


def memory_of(
    loads: Sequence[StageLoad],
    moments: Moments,
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> MemoryPrediction:
    """Return the peak of a rank that holds these stages, in their order in the model.

    state        = Σ over its stages, each category divided by the shard ranks where ZeRO says so
    activations  = Σ saved · microbatches forwarded + results' gradients · microbatches halfway,
                   and Σ saved · microbatches unanswered where the backward is not split
    work         = of the running stage's layer that needs most: transient + unsharded
    unsharded    = ZeRO-3: parameters of the layer, and of the next that is gathered ahead;
                   ZeRO-2 and 3: its whole gradient, from when its first weight's is made
    buffers      = the 16-bit copy of a bucket, where gradients travel so; else buckets are reduced
                   where the gradients lie: under ZeRO-1 each rank's part of the mean comes there,
                   and the rest of the bucket stays for the next step
    margin       = share · all of these

    Activations and work are of the moment at which both together are greatest.
    """
    works = [_works(load, arrangement) for load in loads]
    activations, running = _fullest(loads, [sum(work) for work in works], moments)
    transient, unsharded = works[running]
    parameters, gradients, optimizer = _state(loads, arrangement)
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
    return (
        constants.context_bytes
        + constants.communicator_bytes * _communicators(arrangement)
        + constants.pair_bytes * _pairs(arrangement)
    )


def most_tensor_bytes(
    limit_bytes: int, arrangement: Arrangement, constants: FrameworkConstants
) -> float:
    """Return what all tensors of a rank may take within its limit, a little more than allowed."""
    most = limit_bytes - context_bytes(arrangement, constants)
    return (most + 1) / (1.0 + constants.margin)


def layer_state_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return what a layer's parameters occupy on a rank, divided as ZeRO divides them."""
    zero, shard = arrangement.zero, arrangement.shard
    return (
        _parameter_bytes(cost.parameter_bytes, cost.trainable, arrangement)
        + _part(cost.gradient_bytes, shard, zero >= Zero.GRADIENTS)
        + _part(cost.optimizer_bytes, shard, zero >= Zero.OPTIMIZER)
    )


def layer_unsharded_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return what a layer needs beyond its transient memory because its state is divided.

    Its gradient comes whole only when what the ops after its last weights need is free again (the
    loss behind the head), so that counts with what the ops with weights need.
    """
    if arrangement.shard == 1 or arrangement.zero < Zero.GRADIENTS:
        return 0
    gathered = cost.parameter_bytes if arrangement.zero is Zero.PARAMETERS else 0
    return gathered + max(0, cost.learning_bytes + cost.gradient_bytes - cost.transient_bytes)


def _state(loads: Sequence[StageLoad], arrangement: Arrangement) -> tuple[int, int, int]:
    """Return parameters, gradients and optimizer state, divided as far as ZeRO does."""
    zero, shard = arrangement.zero, arrangement.shard
    return (
        _parameter_bytes(
            sum(load.parameter_bytes for load in loads),
            sum(load.trainable for load in loads),
            arrangement,
        ),
        _part(sum(load.gradient_bytes for load in loads), shard, zero >= Zero.GRADIENTS),
        _part(sum(load.optimizer_bytes for load in loads), shard, zero >= Zero.OPTIMIZER),
    )


def _parameter_bytes(size_bytes: int, trainable: int, arrangement: Arrangement) -> int:
    """Return parameters; ZeRO-2 and 3 hold parts of them in fp32, ZeRO-2 also the gathered ones.

    In 16 bits the parts of what is trained are the fp32 copy that counts as the optimizer's.
    """
    if arrangement.zero < Zero.GRADIENTS or arrangement.shard == 1:
        return size_bytes
    is_half = arrangement.precision.is_half
    parts = 2 * max(0, size_bytes - 2 * trainable) if is_half else size_bytes
    gathered = size_bytes if arrangement.zero is Zero.GRADIENTS else 0
    return gathered + _part(parts, arrangement.shard, is_divided=True)


def _part(size_bytes: int, ranks: int, is_divided: bool) -> int:
    return -(-size_bytes // ranks) if is_divided else size_bytes


def _fullest(
    loads: Sequence[StageLoad], work_bytes: Sequence[int], moments: Moments
) -> tuple[int, int]:
    """Return the bytes of activations at the fullest moment, and the stage that runs then."""
    held = np.zeros(len(moments.running), dtype=np.int64)
    for place, load in enumerate(loads):
        if load.splits_backward:
            held += load.saved_bytes * moments.forwarded[:, place]
            held += load.deferred_bytes * moments.halfway[:, place]
        else:
            held += load.saved_bytes * moments.unanswered[:, place]
    fullest = int(np.argmax(held + np.array(work_bytes)[moments.running]))
    return int(held[fullest]), int(moments.running[fullest])


def state_bytes(load: StageLoad, arrangement: Arrangement) -> int:
    """Return what a stage's parameters occupy on its rank, divided as ZeRO divides them."""
    return sum(_state([load], arrangement))


def work_bytes(load: StageLoad, arrangement: Arrangement) -> int:
    """Return what the layer of a stage needs that needs most, while it runs."""
    return sum(_works(load, arrangement))


def _works(load: StageLoad, arrangement: Arrangement) -> tuple[int, int]:
    """Return transient and unsharded bytes of the layer that needs most of both together."""
    ahead = arrangement.shard > 1 and arrangement.zero is Zero.PARAMETERS
    every = (
        (
            work.cost.transient_bytes,
            layer_unsharded_bytes(work.cost, arrangement) + ahead * work.next_parameter_bytes,
        )
        for work in load.works
    )
    return max(every, key=sum, default=(0, 0))


def _bucket_bytes(loads: Sequence[StageLoad], arrangement: Arrangement) -> int:
    """Return the copy of a bucket of ZeRO-0 and 1 that travels."""
    if not arrangement.compressed_gradients or arrangement.data == 1:
        return 0
    if arrangement.zero >= Zero.GRADIENTS:
        return 0
    return min(sum(load.gradient_bytes for load in loads), arrangement.bucket_bytes) // 2


def _communicators(arrangement: Arrangement) -> int:
    """Return how many groups a rank is in: the world, and each axis of some of its ranks.

    Copies of a sharded model have two more: who shares a copy, and who has the same shard.
    """
    axes = (arrangement.pipeline, arrangement.data, arrangement.tensor)
    has_copies = 1 < arrangement.shard < arrangement.data
    some = sum(1 < degree < arrangement.ranks for degree in axes)
    return (arrangement.ranks > 1) + some + 2 * has_copies


def _pairs(arrangement: Arrangement) -> int:
    """Return how many groups of two a rank may be in: one with each neighbour of its pipeline."""
    has_pairs = SCHEDULES[arrangement.schedule].has_pairs
    return 2 * (has_pairs and arrangement.pipeline > 2)
