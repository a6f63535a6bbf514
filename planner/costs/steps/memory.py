"""Predicts the memory of a rank: the peak of a backward, parameters, states, libraries, the host.

A backward runs the layers from the last to the first. After each layer it frees what the layer
saved, and leaves the gradients of its weights. The peak is the greater of (see PeakMemory):

    most     = max over moments of: activations + gradients + transient + unsharded
    learning = the moment at which the largest gradient of a weight is made in the weight's dtype,
               and copied to fp32
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autopar.planner.costs.prediction import Arrangement, LayerCost, MemoryPrediction, State
from autopar.planner.costs.schedules.table import SCHEDULES, Moments
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.stage_load import LayerWork, StageLoad
from autopar.planner.costs.steps.state import (
    float8_parts,
    gathered_bytes,
    host_bytes,
    lasting_bytes,
    own_part,
    sent_bucket_bytes,
    state_by_category,
)


class PeakMemory(NamedTuple):
    """The peak of a rank in a backward, besides parameters and states.

    `unsharded` are gathered parameters, and gradients that are not reduced yet.
    """

    activations: int
    gradients: int  # computed since the backward began, if they were not allocated before it
    transient: int
    unsharded: int


def most_of_microbatches(
    loads: Sequence[StageLoad], moments: Moments, arrangement: Arrangement
) -> PeakMemory:
    """Return the peak if several microbatches accumulate into gradients.

        activations  = Σ saved · microbatches forwarded + results' gradients · microbatches halfway,
                       or Σ saved · microbatches unanswered, for stages without split backward
        work         = what the running stage needs besides (`_work`)

    Both are taken at the moment at which their sum is greatest. Unanswered: forwarded, and without
    an input gradient yet. Halfway: between the two halves of a split backward. See `Moments`.
    """
    works = [_work(load, arrangement) for load in loads]
    held = np.zeros(len(moments.running), dtype=np.int64)
    for place, load in enumerate(loads):
        if load.splits_backward:
            held += load.saved_bytes * moments.forwarded[:, place]
            held += load.deferred_bytes * moments.halfway[:, place]
        else:
            held += load.saved_bytes * moments.unanswered[:, place]
    fullest = int(np.argmax(held + np.array([sum(work) for work in works])[moments.running]))
    work = works[int(moments.running[fullest])]
    return work._replace(activations=work.activations + int(held[fullest]))


def _work(load: StageLoad, arrangement: Arrangement) -> PeakMemory:
    """Return the most that a backward needs beyond all tensors that the stage saved.

    What it has freed of these by then is subtracted, except for the layer with the largest need,
    which counts as if it came first. With ZeRO-0 and 1, gradients of weights are added one by one
    to those of earlier microbatches, or fill buckets that leave for the host:

        learning_l + fp32 and 16-bit gradient of a weight + waiting + leaving + beside
                   − Σ_{i > l} saved_i

    `waiting` are gradients that wait for other uses of a shared weight, `leaving` those on their
    way to the host, `beside` tensors that other layers save there.
    """
    most, freed, made = PeakMemory(0, 0, *_layer_that_needs_most(load, arrangement)), 0, 0
    if arrangement.divided.shards_modules:
        return most
    for work in reversed(load.works):
        cost = work.cost
        coming = cost.learned_gradient_bytes + _narrow_bytes(cost, arrangement)
        waiting = _waiting_bytes(cost, arrangement)
        sends = arrangement.offload.has_states
        leaving = _beside_buckets(made, arrangement.bucket_bytes, arrangement) if sends else 0
        here = waiting + coming + work.beside_bytes
        most = max(most, _learning(cost, -freed, leaving, here), key=sum)
        made += work.count * cost.gradient_bytes
        freed += work.count * cost.saved_bytes
    return most


def _layer_that_needs_most(load: StageLoad, arrangement: Arrangement) -> tuple[int, int]:
    """Return transient and unsharded bytes of the layer with the largest sum of both."""
    every = (
        (
            work.cost.transient_bytes + work.beside_bytes,
            layer_unsharded_bytes(work.cost, arrangement) + _ahead_bytes(work, arrangement),
        )
        for work in load.works
    )
    return max(every, key=sum, default=(0, 0))


def work_bytes(load: StageLoad, arrangement: Arrangement) -> int:
    """Return the largest need of a stage's layers while they run."""
    return sum(_layer_that_needs_most(load, arrangement))


def layer_unsharded_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return a layer's need beyond its transient memory if ZeRO-2 or 3 shards its state.

    When the whole gradient exists, ops after the last weights (the loss after the head) have freed
    their memory. So it is added to what this moment needs, not to the layer's peak.
    """
    if not arrangement.divided.shards_modules:
        return 0
    needed = cost.learning_bytes + cost.gradient_bytes + cost.early_gradient_bytes
    return _gathered_bytes(cost, arrangement) + max(0, needed - cost.transient_bytes)


def _gathered_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return the parameters that ZeRO-3 gathers for a layer."""
    size = gathered_bytes(cost, float8_parts=float8_parts(arrangement))
    return int(arrangement.divided.divides_parameters * size)


def _ahead_bytes(work: LayerWork, arrangement: Arrangement) -> int:
    """Return the parameters of the next layer, which ZeRO-3 has gathered while this one runs."""
    return 0 if work.next is None else _gathered_bytes(work.next, arrangement)


def most_in_one_pass(load: StageLoad, arrangement: Arrangement) -> PeakMemory:
    """Return the peak within the only backward of a step, which starts without gradients.

    While layer l runs, later layers have freed what they saved, and left their gradients:

        Σ_{i ≤ l} saved_i + transient_l + Σ_{i > l} gradient_i
        Σ_{i ≤ l} saved_i + learning_l  + Σ_{i ≥ l} gradient_i    when its last gradient is made

    To both, the unsharded memory is added. Of equal layers only the first and the last are
    examined: between them the sums are monotonic.
    """
    held = load.saved_bytes
    moments: list[PeakMemory] = []
    for moment in moments_of_one_pass(load.works, arrangement):
        cost = moment.work.cost
        before = held - moment.done * cost.saved_bytes
        moments += moment.most(cost, before)
        if moment.done == moment.work.count - 1:
            held = before - cost.saved_bytes
    return max(moments, key=sum)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePassMoment:
    """A layer's turn in the only backward of a step: the memory besides activations."""

    work: LayerWork
    done: int  # equal layers that have run before it in this backward
    made_bytes: int  # gradients of later layers, if they are not in buckets
    after_bytes: int  # the same, with this layer's own
    # gathered parameters, gradients of shared weights that wait, tensors to and from the host
    unsharded_bytes: int
    coming_bytes: int  # its own gradients while computed, besides the part that stays

    def most(self, cost: LayerCost, saved_bytes: int) -> tuple[PeakMemory, PeakMemory]:
        """Return the peaks while the layer runs in a mode, given the saved bytes."""
        return (
            PeakMemory(saved_bytes, self.made_bytes, cost.transient_bytes, self.unsharded_bytes),
            _learning(
                cost, saved_bytes, self.after_bytes, self.unsharded_bytes + self.coming_bytes
            ),
        )

    def needed_bytes(self, cost: LayerCost) -> int:
        """Return the greater of both peaks, without saved tensors."""
        return max(map(sum, self.most(cost, 0)))


def moments_of_one_pass(
    works: Sequence[LayerWork], arrangement: Arrangement
) -> Iterator[OnePassMoment]:
    """Yield the layers of the only backward of a step, from the last one to the first.

    While a layer computes gradients, it needs memory for more than the part that stays. With ZeRO-2
    and 3 it has whole gradients; otherwise one weight's gradient in 16 bits, and in fp32, too, if
    the weight is shared and its gradient is counted in another layer. Buckets stay allocated, and
    new gradients lie outside of them until a bucket is complete.
    """
    made, gathered = 0, sum(work.count * work.cost.parameter_bytes for work in works)
    for work in reversed(works):
        cost = work.cost
        own = own_part(cost.gradient_bytes, arrangement)
        bucket = max(arrangement.bucket_bytes, cost.learned_gradient_bytes)
        for done in sorted({0, work.count - 1}):
            before = made + done * own
            unsharded = _gathered_bytes(cost, arrangement) + _ahead_bytes(work, arrangement)
            if arrangement.divided.keeps_gathered:
                unsharded = gathered - done * cost.parameter_bytes
            yield OnePassMoment(
                work=work,
                done=done,
                made_bytes=_beside_buckets(before, arrangement.bucket_bytes, arrangement),
                after_bytes=_beside_buckets(before + own, bucket, arrangement),
                unsharded_bytes=unsharded + work.beside_bytes + _waiting_bytes(cost, arrangement),
                coming_bytes=_coming_bytes(cost, arrangement),
            )
        made += work.count * own
        gathered -= work.count * cost.parameter_bytes


def _coming_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return a layer's gradients while they are computed, besides the part that stays."""
    if arrangement.divided.shards_modules:
        return cost.gradient_bytes + cost.early_gradient_bytes
    held_elsewhere = max(0, cost.learned_gradient_bytes - cost.gradient_bytes)
    return held_elsewhere + _narrow_bytes(cost, arrangement)


def _narrow_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return the 16-bit gradient of a weight, from which an fp32 one is made."""
    return cost.learned_gradient_bytes // 2 if arrangement.precision.is_half else 0


def _waiting_bytes(cost: LayerCost, arrangement: Arrangement) -> int:
    """Return the gradients of shared weights that wait; in fully_shard, in the weights' dtype."""
    is_narrow = arrangement.divided.shards_modules and arrangement.precision.is_half
    return cost.waiting_gradient_bytes // (2 if is_narrow else 1)


def _beside_buckets(made_bytes: int, bucket_bytes: int, arrangement: Arrangement) -> int:
    """Return the bytes of gradients that are not in a bucket yet.

    Gradients that leave for the host need one bucket that fills, and one that is copied.
    """
    if arrangement.offload.has_states:
        return _LEAVING * min(made_bytes, bucket_bytes)
    return min(made_bytes, bucket_bytes) if arrangement.has_buckets else made_bytes


_LEAVING = 2  # buckets: one takes gradients while the one before is copied to the host


def _learning(cost: LayerCost, saved_bytes: int, gradients: int, unsharded: int) -> PeakMemory:
    """Return the peak when a weight's gradient is computed.

    A negative `learning_bytes` is memory that has been freed by then.
    """
    freed = min(0, cost.learning_bytes)
    return PeakMemory(saved_bytes + freed, gradients, cost.learning_bytes - freed, unsharded)


def memory_of(
    loads: Sequence[StageLoad],
    moments: Moments,
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> MemoryPrediction:
    """Return the peak of a rank that holds these stages, in their order in the model.

    state        = Σ over its stages, each category divided by the shard ranks where ZeRO says so
    backward     = activations + gradients + transient + unsharded of the fullest moment of any
                   backward
    buffers      = compressed copies of a bucket, if gradients are compressed. Otherwise buckets
                   are reduced in place: under ZeRO-1 each rank's part of the mean is written
                   there, and the rest of the bucket stays for the next step
    margin       = a share of all these
    """
    if arrangement.is_one_pass:
        most = most_in_one_pass(loads[0], arrangement)
    else:
        most = most_of_microbatches(loads, moments, arrangement)
    totals = State(
        parameter_bytes=sum(load.parameter_bytes for load in loads),
        gradient_bytes=sum(load.gradient_bytes for load in loads),
        optimizer_bytes=sum(load.optimizer_bytes for load in loads),
        trainable=sum(load.trainable for load in loads),
    )
    parameters, gradients, optimizer = state_by_category(totals, arrangement)
    return MemoryPrediction(
        parameter_bytes=parameters,
        gradient_bytes=gradients + most.gradients,
        optimizer_bytes=optimizer,
        activation_bytes=most.activations,
        transient_bytes=most.transient,
        unsharded_bytes=most.unsharded,
        communication_bytes=sent_bucket_bytes(totals, arrangement),
        margin_bytes=round(constants.margin * (lasting_bytes(totals, arrangement) + sum(most))),
        context_bytes=context_bytes(arrangement, constants),
        host_bytes=sum(host_bytes(load, arrangement) for load in loads)
        + _most_on_host(loads, moments),
    )


def _most_on_host(loads: Sequence[StageLoad], moments: Moments) -> int:
    """Return the most that a rank's layers save on the host: of all microbatches in flight."""
    sizes, staying = (
        np.array([getattr(load, name) for load in loads], dtype=np.int64)
        for name in ("host_saved_bytes", "staying_bytes")
    )
    held = moments.unanswered * sizes - (moments.unanswered > 0) * staying
    return int(held.sum(axis=1).max())


def context_bytes(arrangement: Arrangement, constants: FrameworkConstants) -> int:
    """Return what libraries allocate on each rank, whatever tensors it holds."""
    return (
        constants.context_bytes
        + constants.communicator_bytes * _communicators(arrangement)
        + constants.pair_bytes * _pairs(arrangement)
    )


def most_tensor_bytes(
    limit_bytes: int, arrangement: Arrangement, constants: FrameworkConstants
) -> float:
    """Return the limit for all tensors of a rank, plus a byte, since the margin is rounded."""
    most = limit_bytes - context_bytes(arrangement, constants)
    return (most + 1) / (1.0 + constants.margin)


def _communicators(arrangement: Arrangement) -> int:
    """Return a rank's number of process groups: the world, and each axis with some of its ranks.

    With copies of a sharded model there are two more: the shard group and the replica group.
    """
    axes = (arrangement.pipeline, arrangement.data, arrangement.tensor)
    has_copies = 1 < arrangement.shard < arrangement.data
    some = sum(1 < degree < arrangement.ranks for degree in axes)
    return (arrangement.ranks > 1) + some + 2 * has_copies


def _pairs(arrangement: Arrangement) -> int:
    """Return the number of a rank's groups of two: one with each pipeline neighbour.

    A pipeline of two ranks needs none, and 1F1B has none: its neighbours use the whole group.
    """
    has_pairs = SCHEDULES[arrangement.schedule].has_pairs
    return 2 * (has_pairs and arrangement.pipeline > 2)
