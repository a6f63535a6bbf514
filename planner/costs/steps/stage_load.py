"""Sums the layers of a stage, and finds the process groups of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby

from autopar.planner.cluster.cluster import Cluster, Collective, Device, HostShare
from autopar.planner.cluster.shape import (
    GroupShape,
    ends_shape,
    group_shape,
    kinds_of_blocks,
    neighbour_shape,
)
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.rates import Throughput, rates_of
from autopar.planner.costs.prediction import Arrangement, LayerCost, RankCost
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.steps.framework import (
    OUTER_STEP_BYTES,
    FrameworkConstants,
    host_outer_seconds,
)
from autopar.planner.costs.steps.overlap import LayerLoad
from autopar.planner.costs.steps.state import float8_elements, float8_parts
from autopar.planner.precision import GRADIENT_BYTES, Compression, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Equal layers in a backward.

    `next` is the layer whose backward follows: ZeRO-3 has already gathered it. `beside_bytes` are
    what the nearest earlier layer on the host saves there. They are copied to the host during this
    layer's forward, and back during its backward.
    """

    cost: LayerCost
    count: int
    next: LayerCost | None
    beside_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad(RankCost):
    """A stage: the sums over its layers.

    `float8_weights` has the rows of weights, and the elements of all weights with these rows.
    """

    works: tuple[LayerWork, ...]  # in the order of the layers
    layers: tuple[LayerLoad, ...]  # of equal layers in a row
    gradient_seconds: float = 0.0  # of casting and adding up the gradients, part of a backward
    staying_bytes: int = 0  # of host_saved_bytes: not copied, because the backward comes at once

    @property
    def seconds(self) -> float:
        """The forward and backward of one microbatch."""
        return self.forward_seconds + self.backward_seconds + self.gradient_seconds

    @property
    def splits_backward(self) -> bool:
        """Whether a schedule may split its backward.

        With recomputation it may not: each half would recompute, or fetch tensors from the host.
        """
        return not self.recompute_seconds

    def stage_seconds(
        self, *, forward_more: float, backward_more: float, action_seconds: float, splits: bool
    ) -> StageSeconds:
        """Return a stage's times for a schedule, including waits and the host's time per action.

        `splits` says whether the schedule splits its backward. A stage with recomputation does
        everything in the first half.
        """
        weights = self.weight_gradient_seconds + self.gradient_seconds
        backward = self.backward_seconds + self.gradient_seconds + backward_more + action_seconds
        whole = StageSeconds(
            forward_seconds=self.forward_seconds + forward_more + action_seconds,
            backward_seconds=backward,
            input_gradient_seconds=backward,
            weight_gradient_seconds=action_seconds if splits else 0.0,
        )
        if not (splits and self.splits_backward):
            return whole
        return whole._replace(
            input_gradient_seconds=backward - weights,
            weight_gradient_seconds=weights + action_seconds,
        )


_SUMMED = {one.name for one in fields(RankCost)} - {"output_bytes", "float8_weights"}


def stage_load(layers: Sequence[LayerCost]) -> StageLoad:
    """Return the sums over the layers of a stage; equal layers in a row are one object."""
    runs = tuple(_runs(layers))
    sums = {name: sum(count * getattr(cost, name) for cost, count in runs) for name in _SUMMED}
    narrow = Counter[int]()
    for cost, count in runs:
        for rows, elements in cost.float8_weights:
            narrow[rows] += count * elements
    return StageLoad(
        **sums,
        float8_weights=tuple(narrow.items()),
        output_bytes=layers[-1].output_bytes if layers else 0,
        works=tuple(_works(runs)),
        layers=tuple(_load(cost, count) for cost, count in runs),
    )


def _runs(layers: Sequence[LayerCost]) -> Iterator[tuple[LayerCost, int]]:
    for _, group in groupby(layers, key=id):
        alike = list(group)
        yield alike[0], len(alike)


def _works(runs: Sequence[tuple[LayerCost, int]]) -> Iterator[LayerWork]:
    """Yield the first layer of each run, whose `next` is of the run before, then the others."""
    before: LayerCost | None = None
    beside = 0
    for cost, count in runs:
        for number in (1, count - 1):
            if number:
                yield LayerWork(cost=cost, count=number, next=before, beside_bytes=beside)
            before, beside = cost, cost.host_saved_bytes or beside


def _load(cost: LayerCost, count: int) -> LayerLoad:
    return LayerLoad(
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        parameter_bytes=cost.parameter_bytes,
        float8_weights=cost.float8_weights,
        gradient_bytes=cost.gradient_bytes,
        whole_gradient_bytes=cost.whole_gradient_bytes,
        thin_gradient_bytes=cost.thin_gradient_bytes,
        statistics=cost.statistics,
        count=count,
    )


_NORM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """The shapes of all groups, and the rates of each pipeline rank's unlike devices."""

    tensor: GroupShape
    data: GroupShape  # the data ranks that average gradients in every step
    shard: GroupShape
    replicas: GroupShape  # the data ranks with the same part, whose gradients are averaged
    outer: GroupShape  # the ranks with the same part in replicas that take local steps
    neighbours: GroupShape  # of two consecutive stages
    ends: GroupShape  # of the first and the last stage
    stages: GroupShape  # of all stages of a pipeline
    stage_rates: tuple[tuple[Throughput, ...], ...]  # of the devices of each pipeline rank
    host: HostShare  # the least of all devices
    peak_flops_per_second: float

    def transfer_seconds(self, size_bytes: int) -> float:
        """Return the seconds to send a tensor from a stage to the next."""
        return collective_seconds(Collective.POINT_TO_POINT, size_bytes, self.neighbours)

    def slowest_rates(self, rank: int) -> Throughput:
        """Return the rates of the pipeline rank's device with the least memory bandwidth."""
        return min(self.stage_rates[rank], key=_stream)

    @property
    def fastest_rates(self) -> Throughput:
        """The rates of the pipeline rank whose slowest device has the most bandwidth."""
        return max((min(rates, key=_stream) for rates in self.stage_rates), key=_stream)


def _stream(rates: Throughput) -> float:
    return rates.stream_bytes_per_second


def norm_seconds(groups: RankGroups, arrangement: Arrangement) -> float:
    """Return the seconds to sum the gradients' norm, axis by axis, over ranks that hold parts."""
    is_sharded = arrangement.zero.divides_optimizer
    shapes = (groups.tensor, *((groups.shard,) if is_sharded else ()), groups.stages)
    return sum(collective_seconds(Collective.ALL_REDUCE, _NORM_BYTES, shape) for shape in shapes)


def scale_seconds(
    load: StageLoad, rates: Throughput, groups: RankGroups, arrangement: Arrangement
) -> float:
    """Return the seconds to find the scales of weights that are gathered in float8, once a step.

    Each rank reads its parts, and one all-reduce finds the largest elements of whole weights.
    """
    parts = float8_parts(arrangement)
    elements = float8_elements(load, parts)
    if not elements:
        return 0.0
    reading = arrangement.precision.item_bytes * elements / parts / rates.stream_bytes_per_second
    return reading + summed_seconds(groups.shard, GRADIENT_BYTES * load.trainable_tensors)


def summed_seconds(shape: GroupShape, size_bytes: float) -> float:
    """Return the seconds to all-reduce this many bytes over a group."""
    return collective_seconds(Collective.ALL_REDUCE, size_bytes, shape)


def rank_groups(cluster: Cluster, arrangement: Arrangement) -> RankGroups:
    """Return the groups of an arrangement on a cluster. Cached."""
    return _groups(
        cluster,
        arrangement.pipeline,
        arrangement.data,
        arrangement.tensor,
        arrangement.shard,
        is_local=arrangement.is_local,
        precision=arrangement.precision,
    )


@lru_cache(maxsize=1024)
def _groups(
    cluster: Cluster,
    pipeline: int,
    data: int,
    tensor: int,
    shard: int,
    *,
    is_local: bool,
    precision: Precision,
) -> RankGroups:
    """Return the groups: ranks are numbered by tensor first, then shard, replica and pipeline."""
    width = tensor * data
    alone, copies = group_shape(cluster, 1, 1), group_shape(cluster, data // shard, tensor * shard)
    return RankGroups(
        tensor=group_shape(cluster, tensor, 1),
        data=group_shape(cluster, shard if is_local else data, tensor),
        shard=group_shape(cluster, shard, tensor),
        replicas=alone if is_local else copies,
        outer=copies if is_local else alone,
        neighbours=neighbour_shape(cluster, pipeline, width),
        ends=ends_shape(cluster, (pipeline - 1) * width),
        stages=group_shape(cluster, pipeline, width),
        stage_rates=tuple(
            tuple(_rates(device, precision) for device in devices)
            for devices in kinds_of_blocks(cluster, pipeline)
        ),
        host=least_host(cluster),
        peak_flops_per_second=sum(
            node.devices * _peak(node.device, precision) for node in cluster.nodes
        ),
    )


def least_host(cluster: Cluster) -> HostShare:
    """Return the least memory and the lowest rates of all devices' hosts."""
    hosts = [node.device.host for node in cluster.nodes]
    names = [one.name for one in fields(HostShare)]
    return HostShare(**{name: min(getattr(one, name) for one in hosts) for name in names})


@lru_cache(maxsize=256)
def _rates(device: Device, precision: Precision) -> Throughput:
    return rates_of(device, precision).own


def _peak(device: Device, precision: Precision) -> float:
    peaks = dict(device.peaks)
    return next(peaks[dtype] for dtype in precision.peaks if dtype in peaks)


def with_first_fetch(
    load: StageLoad, stage: int, arrangement: Arrangement, link_bytes_per_second: float
) -> StageLoad:
    """Return a stage whose backward also waits for the tensors of its last layer on the host.

    Another microbatch's forward has run before this backward, so these tensors are on the host. The
    last stage runs a microbatch's backward right after its forward, and they stay on the device.
    """
    last_stage = arrangement.pipeline * arrangement.stages_per_rank - 1
    saved = [work.cost.host_saved_bytes for work in load.works if work.cost.host_saved_bytes]
    if not saved:
        return load
    if stage == last_stage:
        return replace(load, staying_bytes=saved[-1])
    waits = saved[-1] / link_bytes_per_second
    return replace(
        load,
        backward_seconds=load.backward_seconds + waits,
        recompute_seconds=load.recompute_seconds + waits,
        host_wait_seconds=load.host_wait_seconds + waits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSeconds:
    """A local step's share of outer steps, for one stage."""

    computed: float
    sent: float  # beside later local steps, if outer steps go through the model in parts


# Moved for each element of an outer step, beside SGD: change and mean 36, parameters 40.
_OUTER_BYTES = 76


def outer_seconds(
    load: StageLoad,
    devices: Sequence[Throughput],
    groups: RankGroups,
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> OuterSeconds:
    """Return a local step's share of outer steps: one for each part of the model in every round.

        computed  =  (120 bytes for each element of this rank's part of the parameters ÷ bandwidth
                     + ZeRO-1's gather inside the replica · parts of the model) ÷ local steps
        sent      =  all-reduce of a part of the model, in fp32, over the replicas · parts
                     ÷ local steps

    If the outer optimizer is on the host, 44 of the 120 bytes are moved in the host's memory, and
    copies are added. Parts of the model count as equally large. Leaves out running statistics of
    norms, and that messages beside local steps slow these down.
    """
    if not arrangement.is_local:
        return OuterSeconds(computed=0.0, sent=0.0)
    own_bytes, parts = load.gradient_bytes / arrangement.optimizer_ranks, arrangement.outer_parts
    slowest = min(rates.stream_bytes_per_second for rates in devices)
    on_host, elements = arrangement.offload.has_outer, own_bytes / GRADIENT_BYTES
    computed = elements * (_OUTER_BYTES + OUTER_STEP_BYTES * (not on_host)) / slowest
    if on_host:
        computed += host_outer_seconds(elements, arrangement, constants, groups.host)
    if arrangement.zero.gathers_updated:
        whole = round(load.parameter_bytes)
        computed += parts * collective_seconds(Collective.ALL_GATHER, whole, groups.shard)
    sent = parts * summed_seconds(groups.outer, own_bytes / parts)
    return OuterSeconds(
        computed=computed / arrangement.sync_every, sent=sent / arrangement.sync_every
    )


def sent_bytes(
    gradient_bytes: float, whole_bytes: float, thin_bytes: float, compression: Compression
) -> float:
    """Return how many bytes of gradients are sent, from their bytes in fp32.

    PowerSGD sends `thin_bytes` in place of all but `whole_bytes`. The latter are the gradients that
    tensor ranks or stages add up: if ranks keep the errors of compression, they are sent whole,
    because the errors of partial sums would differ between these ranks.
    """
    if compression.is_low_rank:
        return whole_bytes + thin_bytes
    whole = whole_bytes if compression.keeps_lost else 0.0
    return whole + (gradient_bytes - whole) * compression.share
