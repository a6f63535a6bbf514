"""Turns a stage and the ranks that share its data into seconds of gathering and reducing.

    ZeRO 0      all-reduce of the gradients, by the bucket, beside the last backward
    ZeRO 1      reduce-scatter likewise; the updated parameters are gathered before all else
    ZeRO 2      as 1, but layer by layer, the gathers beside the first forward, and every microbatch
                scatters, since no rank keeps whole gradients
    ZeRO 3      every microbatch gathers each layer for its forward and again for its backward, and
                scatters its gradients

Batch norms see the rows of all ranks, in every pass (norm_statistics.py).

Where a sharded copy lies on fewer ranks than share the data (HSDP), what was scattered is summed
over the copies. One bucket that holds everything is a reduction which nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.planner.cluster.link import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.collectives.norm_statistics import NO_WAIT, Synchronising, synchronising
from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.steps.overlap import (
    LayerLoad,
    Overlapped,
    Seconds,
    bucketed_reduction,
    buckets,
    forward_during_gather,
    gathered_after_optimizer_seconds,
    hierarchical_reduction_seconds,
    sharded_backward,
    sharded_forward,
)
from autopar.planner.costs.steps.stage_load import Repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """The ranks that share the data of a stage, and how they share its state."""

    data: GroupShape  # all of them
    shard: GroupShape  # hold one sharded copy between them
    replicas: GroupShape  # hold the same part of different copies
    zero: Zero
    bucket_bytes: int
    gradient_share: float  # of the gradient's bytes that travel: a half when sent in 16 bits
    slowdown: float
    copy_byte_seconds: float  # between what is sent and where it is used
    gathers_ahead: bool = False  # of ZeRO-1: beside the next forward


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSeconds:
    """What sharing data adds to a stage, beyond computing; `alone` is without any overlap."""

    each_forward: float
    each_backward: float
    last_backward: float  # more, after the last microbatch
    first_forward: float  # more, before the first microbatch
    gathers_alone: float  # of one step, with m microbatches
    reductions_alone: float
    gathers: int  # collectives of one step
    reductions: int
    synchronising: Synchronising = NO_WAIT  # of one microbatch; not in the above

    @property
    def forward_wait(self) -> float:
        """What every forward waits for."""
        return self.each_forward + self.synchronising.forward_seconds

    @property
    def backward_wait(self) -> float:
        """What every backward waits for."""
        return self.each_backward + self.synchronising.backward_seconds


NOTHING = DataSeconds(
    each_forward=0.0,
    each_backward=0.0,
    last_backward=0.0,
    first_forward=0.0,
    gathers_alone=0.0,
    reductions_alone=0.0,
    gathers=0,
    reductions=0,
)


@lru_cache(maxsize=65536)
def data_seconds(
    layers: tuple[Repeated, ...], groups: DataGroups, *, microbatches: int
) -> DataSeconds:
    """Return what gathering and reducing add to the microbatches of a stage."""
    if groups.data.ranks == 1 or not layers:
        return NOTHING
    loads = _loads(layers, groups.gradient_share)
    shared = _sharded if groups.zero is Zero.PARAMETERS else _reduced
    waits = (synchronising(one.statistics, groups.data) for one in layers for _ in range(one.count))
    return replace(shared(loads, groups, microbatches), synchronising=sum(waits, NO_WAIT))


def _loads(layers: Sequence[Repeated], gradient_share: float) -> tuple[LayerLoad, ...]:
    """Return the layers with gradients as they travel; one by one."""
    return tuple(
        load
        for one in layers
        for load in (replace(one.load, gradient_bytes=one.load.gradient_bytes * gradient_share),)
        * one.count
    )


def copy_byte_seconds(rates: Throughput) -> float:
    """Return what fully_shard takes to copy a byte into or out of a buffer: a read and a write."""
    return 2 / rates.stream_bytes_per_second


def _gathering(groups: DataGroups) -> Seconds:
    return _seconds(Collective.ALL_GATHER, groups.shard)


def _reducing(groups: DataGroups) -> Seconds:
    """Return the seconds of the reduction of so many bytes of gradient."""
    if groups.zero is Zero.NONE:
        return _seconds(Collective.ALL_REDUCE, groups.shard)
    scatter = _seconds(Collective.REDUCE_SCATTER, groups.shard)
    if groups.replicas.ranks == 1:
        return scatter
    return hierarchical_reduction_seconds(
        scatter,
        _seconds(Collective.ALL_REDUCE, groups.replicas),
        shard_degree=groups.shard.ranks,
    )


def _seconds(collective: Collective, shape: GroupShape) -> Seconds:
    """Return what so many bytes take, remembered by the size alone."""
    return lru_cache(maxsize=256)(lambda size: collective_seconds(collective, size, shape))


def _sharded(loads: Sequence[LayerLoad], groups: DataGroups, microbatches: int) -> DataSeconds:
    """Return ZeRO-3; what is gathered is copied out of its buffer, gradients into theirs."""
    gather, scatter, each = _gathering(groups), _reducing(groups), groups.copy_byte_seconds
    copied = tuple(
        replace(
            load,
            forward_seconds=load.forward_seconds + each * load.parameter_bytes,
            backward_seconds=load.backward_seconds
            + each * load.parameter_bytes
            + each * load.gradient_bytes,
        )
        for load in loads
    )
    forward = sharded_forward(copied, gather, slowdown=groups.slowdown)
    backward = sharded_backward(copied, gather, scatter, slowdown=groups.slowdown)
    forward_alone = sum(load.forward_seconds for load in loads)
    backward_alone = sum(load.backward_seconds for load in loads)
    gathers = sum(gather(load.parameter_bytes) for load in loads)
    reductions = sum(scatter(load.gradient_bytes) for load in loads)
    return DataSeconds(
        each_forward=forward.total_seconds - forward_alone,
        each_backward=backward.total_seconds - backward_alone,
        last_backward=0.0,
        first_forward=0.0,
        gathers_alone=2 * microbatches * gathers,
        reductions_alone=microbatches * reductions,
        gathers=2 * microbatches * _gathers(loads),
        reductions=microbatches * _reductions(loads),
    )


def _reduced(loads: Sequence[LayerLoad], groups: DataGroups, microbatches: int) -> DataSeconds:
    scatters_each = groups.zero is Zero.GRADIENTS
    bucket = 0 if scatters_each else groups.bucket_bytes  # fully_shard's units are layers
    backward = bucketed_reduction(
        loads, _reducing(groups), bucket_bytes=bucket, slowdown=groups.slowdown
    )
    if not scatters_each:
        first = gathers = 0.0
        if groups.zero is Zero.OPTIMIZER:
            gathers = gathered_after_optimizer_seconds(
                loads, _gathering(groups), bucket_bytes=bucket
            )
            first = _added(_gathered_ahead(loads, groups)) if groups.gathers_ahead else gathers
        return DataSeconds(
            each_forward=0.0,
            each_backward=0.0,
            last_backward=_added(backward),
            first_forward=first,
            gathers_alone=gathers,
            reductions_alone=backward.communication_seconds,
            gathers=_gathers(loads, bucket) if groups.zero is Zero.OPTIMIZER else 0,
            reductions=_reductions(loads, bucket),
        )
    forward = _gathered_ahead(loads, groups)
    gathering = sum(groups.copy_byte_seconds * load.parameter_bytes for load in loads)
    scattering = sum(groups.copy_byte_seconds * load.gradient_bytes for load in loads)
    return DataSeconds(
        each_forward=0.0,
        each_backward=_added(backward) + scattering,
        last_backward=0.0,
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


def _reductions(loads: Sequence[LayerLoad], bucket_bytes: int = 0) -> int:
    return len(list(buckets((one.gradient_bytes for one in reversed(loads)), bucket_bytes)))


def _added(overlapped: Overlapped) -> float:
    return overlapped.exposed_seconds + overlapped.slowdown_seconds
