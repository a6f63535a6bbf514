"""Prices a single stage, including the collectives of its data ranks.

    ZeRO 0      all-reduce of the gradients by buckets, beside the last backward
    ZeRO 1      reduce-scatter likewise; updated parameters are gathered before the first forward
    ZeRO 2      as 1, but layer by layer, the gathers beside the first forward, and every microbatch
                scatters, since no rank keeps whole gradients
    ZeRO 3      every microbatch gathers each layer for its forward and again for its backward, and
                scatters its gradients

Synchronised batch norms wait for the statistics of all data ranks, in every pass.

If the optimizer is on the host, every microbatch reduces, and copies this rank's part to the host
after each reduction; fully_shard fetches its parts from there for each gather.

If a sharded copy lies on fewer ranks than the data axis has (HSDP), scattered gradients are summed
over the copies. If one bucket has all gradients, its reduction overlaps with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.collectives.conversions import NO_WAIT, Synchronising, synchronising
from autopar.planner.costs.kernels.rates import Throughput
from autopar.planner.costs.prediction import Arrangement, LayerCost, Zero
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES, rank_of
from autopar.planner.costs.steps.framework import (
    FrameworkConstants,
    from_host_byte_seconds,
    gradient_seconds,
    to_host_byte_seconds,
    update_seconds,
)
from autopar.planner.costs.steps.overlap import (
    LayerLoad,
    Overlapped,
    Seconds,
    bucketed_reduction,
    buckets,
    forward_during_gather,
    gathered_after_optimizer_seconds,
    sharded_backward,
    sharded_forward,
    summing,
)
from autopar.planner.costs.steps.stage_load import (
    OuterSeconds,
    RankGroups,
    StageLoad,
    outer_seconds,
    scale_seconds,
    sent_bytes,
    stage_load,
    summed_seconds,
    with_first_fetch,
)
from autopar.planner.costs.steps.state import float8_elements, float8_parts, gathered_bytes
from autopar.planner.precision import GRADIENT_BYTES, Compression


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """The data ranks of a stage, and how they share parameters and states."""

    data: GroupShape  # all of them
    shard: GroupShape  # ranks that hold one sharded copy together
    replicas: GroupShape  # ranks that hold the same part of different copies
    zero: Zero
    bucket_bytes: int
    compression: Compression
    slowdown: float
    copy_byte_seconds: float  # of copying between communication buffers and parameters
    gathers_ahead: bool = False  # ZeRO-1 gathers beside the next forward, not before it
    float8_parts: int = 0  # of weights that are gathered in float8
    reduces_each: bool = False  # in every backward of a step
    to_host_byte_seconds: float = 0.0  # of this rank's part of a gradient; 0: it stays here
    from_host_byte_seconds: float = 0.0  # of this rank's part of a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSeconds:
    """What data parallelism adds to a stage's compute time; `alone` is without overlap."""

    each_forward: float = 0.0
    each_backward: float = 0.0
    last_backward: float = 0.0  # added to the last backward
    first_forward: float = 0.0  # added to the first forward
    gathers_alone: float = 0.0  # all gathers of a step
    reductions_alone: float = 0.0  # all reductions of a step
    gathers: int = 0  # number of collectives in a step
    reductions: int = 0
    synchronising: Synchronising = NO_WAIT  # of one microbatch; not included above

    @property
    def forward_wait(self) -> float:
        """Waiting time of every forward."""
        return self.each_forward + self.synchronising.forward_seconds

    @property
    def backward_wait(self) -> float:
        """Waiting time of every backward."""
        return self.each_backward + self.synchronising.backward_seconds


NOTHING = DataSeconds()


@lru_cache(maxsize=65536)
def data_seconds(
    layers: tuple[LayerLoad, ...], groups: DataGroups, *, microbatches: int
) -> DataSeconds:
    """Return what gathers and reductions add to the seconds of a stage."""
    if not layers or (groups.data.ranks == 1 and not groups.to_host_byte_seconds):
        return NOTHING
    loads = _loads(layers, groups)
    shared = _sharded if groups.zero.divides_parameters else _reduced
    waiting = (one for one in layers if one.statistics.norms for _ in range(one.count))
    waits = (synchronising(one.statistics, groups.data) for one in waiting)
    return replace(shared(loads, groups, microbatches), synchronising=sum(waits, NO_WAIT))


def _loads(layers: Sequence[LayerLoad], groups: DataGroups) -> tuple[LayerLoad, ...]:
    """Return the layers one by one, with the bytes that are sent of parameters and gradients."""
    return tuple(load for one in layers for load in (_as_sent(one, groups),) * one.count)


def _as_sent(load: LayerLoad, groups: DataGroups) -> LayerLoad:
    own, whole, thin = load.gradient_bytes, load.whole_gradient_bytes, load.thin_gradient_bytes
    return replace(
        load,
        parameter_bytes=gathered_bytes(load, float8_parts=groups.float8_parts),
        gradient_bytes=sent_bytes(own, whole, thin, groups.compression),
    )


def copy_byte_seconds(rates: Throughput) -> float:
    """Return fully_shard's time to copy a byte into or out of a buffer: a read and a write."""
    return 2 / rates.stream_bytes_per_second


def _gathering(groups: DataGroups) -> Seconds:
    gathered = _seconds(Collective.ALL_GATHER, groups.shard)
    return _then(gathered, groups.from_host_byte_seconds / groups.shard.ranks)


def _reducing(groups: DataGroups) -> Seconds:
    """Return a function from the bytes of gradients to the seconds of their reduction."""
    parts, copies, divided = None, groups.data, 1
    if groups.zero.divides_optimizer:
        parts, copies, divided = groups.shard, groups.replicas, groups.shard.ranks
    share = groups.compression.share or 1.0  # copies are in fp32; PowerSGD (0) has none
    summed = summing(_seconds, parts, copies, groups.compression)
    return _then(summed, groups.to_host_byte_seconds / share / divided)


def _then(sending: Seconds, byte_seconds: float) -> Seconds:
    """Return the formula for a collective and a copy that do not overlap."""
    return (lambda size: sending(size) + byte_seconds * size) if byte_seconds else sending


@lru_cache(maxsize=1024)
def _seconds(collective: Collective, shape: GroupShape) -> Seconds:
    """Return a function from the bytes of a collective to its seconds. Both are cached."""
    return lru_cache(maxsize=4096)(lambda size: collective_seconds(collective, size, shape))


def _sharded(loads: Sequence[LayerLoad], groups: DataGroups, microbatches: int) -> DataSeconds:
    """Return what ZeRO-3 adds; parameters are copied out of a buffer, gradients into one."""
    gather, scatter, each = _gathering(groups), _reducing(groups), groups.copy_byte_seconds
    copying = {
        id(load): replace(
            load,
            forward_seconds=load.forward_seconds + each * load.parameter_bytes,
            backward_seconds=load.backward_seconds
            + each * load.parameter_bytes
            + each * load.gradient_bytes
            + _casting_seconds(load, groups),
        )
        for load in {id(load): load for load in loads}.values()  # equal layers are one object
    }
    copied = tuple(copying[id(load)] for load in loads)
    forward = sharded_forward(copied, gather, slowdown=groups.slowdown)
    backward = sharded_backward(copied, gather, scatter, slowdown=groups.slowdown)
    gathers = sum(gather(load.parameter_bytes) for load in loads)
    reductions = sum(scatter(load.gradient_bytes) for load in loads)
    return DataSeconds(
        each_forward=forward.total_seconds - sum(load.forward_seconds for load in loads),
        each_backward=backward.total_seconds - sum(load.backward_seconds for load in loads),
        gathers_alone=2 * microbatches * gathers,
        reductions_alone=microbatches * reductions,
        gathers=2 * microbatches * _gathers(loads),
        reductions=microbatches * _reductions(loads),
    )


_CAST_BYTES = 27  # to cast an element: to fp32 (6), scale it (8), clamp it (8), to float8 (5)
# Not moved for an element that is gathered in float8: `cast_seconds` counts 5 bytes in the forward
# and 3 in the backward, but only 2 are moved, in the backward, to transpose the weight.
_SPARED_BYTES = 6


def _casting_seconds(load: LayerLoad, groups: DataGroups) -> float:
    """Return how much longer it takes to cast parts of weights before gathers than whole weights.

        elements · max(0, 2 gathers · 27 ÷ ranks − 6) bytes ÷ bandwidth

    Each rank casts its part before every gather, by four uncompiled kernels of torchao
    (`hp_tensor_and_scale_to_float8`, `to_fp8_saturated`). So layers need not cast whole weights,
    which their price includes. From 10 ranks on this is faster, which is left out.
    """
    moved = 2 * _CAST_BYTES / max(1, groups.float8_parts) - _SPARED_BYTES
    elements = float8_elements(load, groups.float8_parts)
    return elements * max(0.0, moved) * groups.copy_byte_seconds / 2


def _reduced(loads: Sequence[LayerLoad], groups: DataGroups, microbatches: int) -> DataSeconds:
    # fully_shard reduces layer by layer
    bucket = 0 if groups.zero.shards_modules else groups.bucket_bytes
    sent = bucket * groups.compression.share  # buckets are filled with fp32
    slowdown = groups.slowdown if groups.data.ranks > 1 else 0.0  # copies take no multiprocessors
    backward = bucketed_reduction(loads, _reducing(groups), bucket_bytes=sent, slowdown=slowdown)
    if not groups.zero.shards_modules:
        first = gathers = 0.0
        times = microbatches if groups.reduces_each else 1
        if groups.zero.gathers_updated:
            gathers = gathered_after_optimizer_seconds(
                loads, _gathering(groups), bucket_bytes=bucket
            )
            first = _added(_gathered_ahead(loads, groups)) if groups.gathers_ahead else gathers
        return DataSeconds(
            each_backward=_added(backward) if groups.reduces_each else 0.0,
            last_backward=0.0 if groups.reduces_each else _added(backward),
            first_forward=first,
            gathers_alone=gathers,
            reductions_alone=times * backward.communication_seconds,
            gathers=_gathers(loads, bucket) if groups.zero.gathers_updated else 0,
            reductions=times * _reductions(loads, sent),
        )
    forward = _gathered_ahead(loads, groups)
    gathering = sum(groups.copy_byte_seconds * load.parameter_bytes for load in loads)
    scattering = sum(groups.copy_byte_seconds * load.gradient_bytes for load in loads)
    return DataSeconds(
        each_backward=_added(backward) + scattering,
        first_forward=_added(forward) + gathering,
        gathers_alone=forward.communication_seconds,
        reductions_alone=microbatches * backward.communication_seconds,
        gathers=_gathers(loads),
        reductions=microbatches * _reductions(loads),
    )


def _gathered_ahead(loads: Sequence[LayerLoad], groups: DataGroups) -> Overlapped:
    return forward_during_gather(loads, _gathering(groups), slowdown=groups.slowdown)


def _gathers(loads: Sequence[LayerLoad], bucket_bytes: int = 0) -> int:
    return len(list(buckets((one.parameter_bytes for one in loads), bucket_bytes)))


def _reductions(loads: Sequence[LayerLoad], bucket_bytes: float = 0) -> int:
    return len(list(buckets((one.gradient_bytes for one in reversed(loads)), bucket_bytes)))


def _added(overlapped: Overlapped) -> float:
    return overlapped.exposed_seconds + overlapped.slowdown_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """The seconds and bytes of a stage."""

    load: StageLoad
    data: DataSeconds
    seconds: StageSeconds  # for the schedule
    transfer_seconds: float  # to send its results to the next stage, for one microbatch
    reduction_seconds: float  # after its last backward: over the data ranks and the tensor axis
    optimizer_seconds: float  # the stages of a rank add up
    outer: OuterSeconds


def stage_price(
    layers: Sequence[LayerCost],
    stage: int,
    *,
    arrangement: Arrangement,
    groups: RankGroups,
    constants: FrameworkConstants,
) -> StagePrice:
    """Return the price of some layers as a stage."""
    devices = groups.stage_rates[rank_of(arrangement.schedule, stage, arrangement.pipeline)]
    link = groups.host.bytes_per_second * constants.host_link_share
    whole = with_first_fetch(stage_load(layers), stage, arrangement, link)
    gradients = (
        gradient_seconds(
            whole.gradient_bytes, whole.trainable_tensors, arrangement, constants, rates
        )
        for rates in devices
    )
    load = replace(whole, gradient_seconds=max(gradients))
    data = data_seconds(
        load.layers,
        data_groups(groups, arrangement, constants, stage=stage),
        microbatches=arrangement.microbatches,
    )
    is_pipeline = arrangement.pipeline > 1
    splits = is_pipeline and SCHEDULES[arrangement.schedule].splits_backward
    return StagePrice(
        load=load,
        data=data,
        seconds=load.stage_seconds(
            forward_more=data.forward_wait,
            backward_more=data.backward_wait,
            action_seconds=constants.action_seconds,
            splits=splits and stage > 0,  # the first stage has no input gradients
        ),
        transfer_seconds=groups.transfer_seconds(load.output_bytes) if is_pipeline else 0.0,
        reduction_seconds=data.last_backward
        + max(compressing_seconds(load, arrangement, rates) for rates in devices)
        + summed_seconds(groups.tensor, load.replicated_gradient_bytes),
        optimizer_seconds=_optimizer_seconds(load, devices, groups, arrangement, constants),
        outer=outer_seconds(load, devices, groups, arrangement, constants),
    )


def _optimizer_seconds(
    load: StageLoad,
    devices: Sequence[Throughput],
    groups: RankGroups,
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> float:
    """Return the optimizer's seconds for one stage on its slowest device."""
    updated = max(
        update_seconds(load.trainable, arrangement, constants, rates=rates, host=groups.host)
        + scale_seconds(load, rates, groups, arrangement)
        for rates in devices
    )
    return updated + load.trainable_tensors * constants.optimizer_tensor_seconds


def data_groups(
    groups: RankGroups, arrangement: Arrangement, constants: FrameworkConstants, *, stage: int
) -> DataGroups:
    """Return the data ranks of a stage, and how they share its parameters and states."""
    rank = rank_of(arrangement.schedule, stage, arrangement.pipeline)
    return DataGroups(
        data=groups.data,
        shard=groups.shard if arrangement.zero.divides_optimizer else groups.data,
        replicas=groups.replicas,
        zero=arrangement.zero,
        bucket_bytes=arrangement.bucket_bytes,
        compression=arrangement.compression,
        slowdown=constants.overlap_slowdown,
        copy_byte_seconds=copy_byte_seconds(groups.slowest_rates(rank)),
        gathers_ahead=constants.gathers_ahead,
        float8_parts=float8_parts(arrangement),
        reduces_each=arrangement.reduces_each,
        to_host_byte_seconds=to_host_byte_seconds(arrangement, constants, groups.host),
        from_host_byte_seconds=from_host_byte_seconds(arrangement, constants, groups.host),
    )


def compressing_seconds(load: StageLoad, arrangement: Arrangement, rates: Throughput) -> float:
    """Return the seconds of the kernels that compress a stage's gradients, once in a step."""
    elements = (load.gradient_bytes - load.whole_gradient_bytes) / GRADIENT_BYTES
    moved = elements * arrangement.compression.moved_bytes * (arrangement.data > 1)
    return moved / rates.stream_bytes_per_second
