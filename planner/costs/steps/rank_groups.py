"""Finds the groups that an arrangement makes of the ranks of a cluster, once for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.planner.cluster.blocks import kinds_of_blocks
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.cluster.device import Device
from autopar.planner.cluster.link import Collective
from autopar.planner.cluster.shape import GroupShape, ends_shape, group_shape, neighbour_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.kernels.rates import rates_of
from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.precision import Precision

_NORM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The shapes of all groups, and the rates of the unlike devices of each pipeline rank."""

    tensor: GroupShape
    data: GroupShape
    shard: GroupShape
    replicas: GroupShape
    neighbours: GroupShape  # of two stages in a row
    ends: GroupShape  # of the first and the last stage
    stages: GroupShape  # all of a pipeline
    stage_rates: tuple[tuple[Throughput, ...], ...]  # of the devices of each pipeline rank
    peak_flops_per_second: float

    def transfer_seconds(self, size_bytes: int) -> float:
        """Return the seconds of one tensor from a stage to the next."""
        return collective_seconds(Collective.POINT_TO_POINT, size_bytes, self.neighbours)

    def slowest_rates(self, rank: int) -> Throughput:
        """Return the rates of the device of a pipeline rank that moves bytes slowest."""
        return min(self.stage_rates[rank], key=_stream)

    @property
    def fastest_rates(self) -> Throughput:
        """Return the rates of the pipeline rank whose slowest device is fastest at moving bytes."""
        return max((min(rates, key=_stream) for rates in self.stage_rates), key=_stream)


def _stream(rates: Throughput) -> float:
    return rates.stream_bytes_per_second


def norm_seconds(groups: RankGroups, arrangement: Arrangement) -> float:
    """Return the seconds to sum a norm, axis by axis, over the ranks with different gradients."""
    is_sharded = arrangement.zero is not Zero.NONE
    shapes = (groups.tensor, *((groups.shard,) if is_sharded else ()), groups.stages)
    return sum(collective_seconds(Collective.ALL_REDUCE, _NORM_BYTES, shape) for shape in shapes)


def summed_seconds(shape: GroupShape, size_bytes: float) -> float:
    """Return the seconds to sum so many bytes over a group."""
    return collective_seconds(Collective.ALL_REDUCE, size_bytes, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    pipeline: int
    data: int
    tensor: int
    shard: int
    precision: Precision


def rank_groups(cluster: Cluster, arrangement: Arrangement) -> RankGroups:
    """Return the groups of an arrangement on a cluster, remembered."""
    degrees = _Degrees(
        pipeline=arrangement.pipeline,
        data=arrangement.data,
        tensor=arrangement.tensor,
        shard=arrangement.shard,
        precision=arrangement.precision,
    )
    return _groups(cluster, degrees)


@lru_cache(maxsize=1024)
def _groups(cluster: Cluster, degrees: _Degrees) -> RankGroups:
    """Return the groups: tensor ranks are neighbours, then shards, replicas, and the pipeline."""
    tensor, data, pipeline, shard = (
        degrees.tensor,
        degrees.data,
        degrees.pipeline,
        degrees.shard,
    )
    width = tensor * data
    return RankGroups(
        tensor=group_shape(cluster, tensor, 1),
        data=group_shape(cluster, data, tensor),
        shard=group_shape(cluster, shard, tensor),
        replicas=group_shape(cluster, data // shard, tensor * shard),
        neighbours=neighbour_shape(cluster, pipeline, width),
        ends=ends_shape(cluster, (pipeline - 1) * width),
        stages=group_shape(cluster, pipeline, width),
        stage_rates=tuple(
            tuple(_rates(device, degrees.precision) for device in devices)
            for devices in kinds_of_blocks(cluster, pipeline)
        ),
        peak_flops_per_second=sum(
            node.devices * _peak(node.device, degrees.precision) for node in cluster.nodes
        ),
    )


@lru_cache(maxsize=256)
def _rates(device: Device, precision: Precision) -> Throughput:
    return rates_of(device, precision).own


def _peak(device: Device, precision: Precision) -> float:
    """Return the peak of a precision; without bf16 units those of fp16 or fp32 count."""
    peaks = dict(device.peaks)
    wanted = (precision.value, "fp16", "fp32") if precision.is_half else ("fp32",)
    return next(peaks[dtype] for dtype in wanted if dtype in peaks)
