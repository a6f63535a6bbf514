"""Turns the stages of one rank into what the rank holds at its peak, by category."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.costs.prediction import Arrangement, LayerCost, MemoryPrediction, Zero
from autopar.planner.costs.schedules.moments import Moments
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.backward_memory import most_in_one_pass, most_of_microbatches
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
    backward     = activations + gradients + transient + unsharded of the fullest moment of any
                   backward (`backward_memory.py`)
    buffers      = the 16-bit copy of a bucket, where gradients travel so; else buckets are reduced
                   where the gradients lie: under ZeRO-1 each rank's part of the mean comes there,
                   and the rest of the bucket stays for the next step
    margin       = share · all of these
    """
    if arrangement.is_one_pass:
        most = most_in_one_pass(loads[0], arrangement)
    else:
        most = most_of_microbatches(loads, moments, arrangement)
    parameters, gradients, optimizer = _state(loads, arrangement)
    buckets = _bucket_bytes(loads, arrangement)
    everything = lasting_bytes(loads, arrangement) + sum(most)
    return MemoryPrediction(
        parameter_bytes=parameters,
        gradient_bytes=gradients + most.gradients,
        optimizer_bytes=optimizer,
        activation_bytes=most.activations,
        transient_bytes=most.transient,
        unsharded_bytes=most.unsharded,
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
        + _lasting_gradient_bytes(cost.gradient_bytes, arrangement)
        + _part(cost.optimizer_bytes, shard, zero >= Zero.OPTIMIZER)
    )


def _state(loads: Sequence[StageLoad], arrangement: Arrangement) -> tuple[int, int, int]:
    """Return parameters, gradients and optimizer state, divided as far as ZeRO does."""
    zero, shard = arrangement.zero, arrangement.shard
    return (
        _parameter_bytes(
            sum(load.parameter_bytes for load in loads),
            sum(load.trainable for load in loads),
            arrangement,
        ),
        _lasting_gradient_bytes(sum(load.gradient_bytes for load in loads), arrangement),
        _part(sum(load.optimizer_bytes for load in loads), shard, zero >= Zero.OPTIMIZER),
    )


def _lasting_gradient_bytes(size_bytes: int, arrangement: Arrangement) -> int:
    """Return the gradients that lie beside the activations of a forward.

    Microbatches before have left them, or they have buckets, which stay from step to step.
    """
    if arrangement.is_one_pass and not arrangement.has_buckets:
        return 0
    return _part(size_bytes, arrangement.shard, arrangement.divides_gradients)


def _parameter_bytes(size_bytes: int, trainable: int, arrangement: Arrangement) -> int:
    """Return parameters; ZeRO-2 and 3 hold parts of them in fp32, ZeRO-2 also the gathered ones.

    In 16 bits the parts of what is trained are the fp32 copy that counts as the optimizer's. Where
    a step is one pass, ZeRO-2 frees gathered layers one by one, and they count as unsharded.
    """
    if not arrangement.divides_gradients:
        return size_bytes
    is_half = arrangement.precision.is_half
    parts = 2 * max(0, size_bytes - 2 * trainable) if is_half else size_bytes
    stays_gathered = arrangement.zero is Zero.GRADIENTS and not arrangement.is_one_pass
    return size_bytes * stays_gathered + _part(parts, arrangement.shard, is_divided=True)


def _part(size_bytes: int, ranks: int, is_divided: bool) -> int:
    return -(-size_bytes // ranks) if is_divided else size_bytes


def lasting_bytes(loads: Sequence[StageLoad], arrangement: Arrangement) -> int:
    """Return what stages hold throughout a step: state and copies of buckets."""
    return sum(_state(loads, arrangement)) + _bucket_bytes(loads, arrangement)


def state_bytes(load: StageLoad, arrangement: Arrangement) -> int:
    """Return what a stage's parameters occupy on its rank, divided as ZeRO divides them."""
    return sum(_state([load], arrangement))


def _bucket_bytes(loads: Sequence[StageLoad], arrangement: Arrangement) -> int:
    """Return the copy of a bucket of ZeRO-0 and 1 that travels."""
    if not arrangement.compressed_gradients or not arrangement.has_buckets:
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
