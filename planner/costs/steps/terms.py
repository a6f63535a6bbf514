"""Splits the seconds of a step into terms, and lists each kind of communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from autopar.planner.cluster.cluster import Collective
from autopar.planner.costs.collectives.conversions import NO_WAIT
from autopar.planner.costs.ops.measurements import Provenance
from autopar.planner.costs.prediction import Arrangement, CommunicationTerm, TimeTerm
from autopar.planner.costs.schedules.table import rank_of
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.stage_load import (
    OuterSeconds,
    RankGroups,
    StageLoad,
    sent_bytes,
    summed_seconds,
)
from autopar.planner.costs.steps.stage_price import StagePrice
from autopar.planner.costs.steps.state import float8_parts, gathered_bytes
from autopar.planner.precision import Compression

_ROUNDING = 1e-12  # idle times up to this share of the pipeline's time are rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The figures from which the terms of a step are computed."""

    arrangement: Arrangement
    groups: RankGroups
    constants: FrameworkConstants
    prices: tuple[StagePrice, ...]
    pipeline_seconds: float
    first_gather_seconds: float
    last_reduction_seconds: float
    tied_gradient_bytes: int
    tied_seconds: float
    optimizer_seconds: float
    outer: OuterSeconds

    @property
    def seconds(self) -> float:
        """The time from one step to the next."""
        return self._with_outer(self.outer_seconds)

    @property
    def outer_seconds(self) -> float:
        """The share of outer steps that lengthens a local step."""
        return self.outer.computed + self.outer.sent - self.outer_hidden_seconds

    @property
    def outer_hidden_seconds(self) -> float:
        """The seconds of a local step's share of messages that run beside local steps.

            min(sent, step · parts · (local steps of a part − 1) ÷ local steps)

        `step` is without outer steps. A part is sent after the part before it has been applied. A
        model that is sent whole is sent between local steps: 0.
        """
        parts, steps = self.arrangement.outer_parts, self.arrangement.sync_every
        if parts == 1:
            return 0.0
        whole = self.outer.computed + self.outer.sent
        beside = self._with_outer(whole) - whole
        return min(self.outer.sent, beside * parts * (steps // parts - 1) / steps)

    def _with_outer(self, outer_seconds: float) -> float:
        return (
            self.first_gather_seconds + self.pipeline_seconds + self.last_reduction_seconds
            + self.tied_seconds + self.optimizer_seconds + outer_seconds
            + self.constants.step_seconds
        )  # fmt: skip

    @property
    def outer_delay(self) -> int:
        """The local steps during which a part of the model is sent; fewer than a part has."""
        arrangement = self.arrangement
        if arrangement.outer_parts == 1:
            return 0
        of_part = arrangement.sync_every // arrangement.outer_parts
        needed = ceil(
            self.outer.sent * arrangement.sync_every / arrangement.outer_parts / self.seconds
        )
        return min(max(1, needed), of_part - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusiestRank:
    """The times of the rank with the most work in a step."""

    compute_seconds: float
    recompute_seconds: float
    host_wait_seconds: float  # for copies of saved tensors to the host and back
    tensor_seconds: float
    data_seconds: float  # waits for collectives of the data axis in its microbatches
    framework_seconds: float  # the host's work around forwards and backwards
    measured_seconds: float
    prices: tuple[StagePrice, ...]  # of its stages, whose numbers are `stages`
    stages: tuple[int, ...]
    sums_seconds: float  # of gradients over the tensor axis
    exposed_sums_seconds: float  # the part of these that outlasts the pipeline

    @property
    def seconds(self) -> float:
        """The sum of its times; the measured seconds are a part of these."""
        return (
            self.compute_seconds + self.recompute_seconds + self.host_wait_seconds
            + self.tensor_seconds + self.data_seconds + self.framework_seconds
        )  # fmt: skip


def time_terms(step: StepTerms, *, is_net_measured: bool) -> tuple[TimeTerm, ...]:
    """Return the terms of the busiest rank; the rest of the pipeline's time is its bubble.

    `is_net_measured` says whether latency and rate of every link were measured.
    """
    busiest = busiest_rank(step)
    summed = busiest.exposed_sums_seconds
    last_reduction = step.last_reduction_seconds - summed
    exposed = busiest.data_seconds + step.first_gather_seconds + last_reduction
    source = _provenance(busiest)
    host = Provenance.MEASURED if step.constants.is_measured else Provenance.FORMULA
    net = Provenance.MIXED if is_net_measured else Provenance.FORMULA
    is_shared = step.arrangement.averaging_ranks > 1 or not step.arrangement.offload.has_states
    rows = (
        ("compute", busiest.compute_seconds, source),
        ("recompute", busiest.recompute_seconds, source),
        ("exposed activation copies", busiest.host_wait_seconds, net),
        ("tensor communication", busiest.tensor_seconds + summed, net),
        ("pipeline bubble", _idle_seconds(step, busiest), Provenance.FORMULA),
        ("exposed data parallel" if is_shared else "exposed host copies", exposed, net),
        ("tied weights", step.tied_seconds, net),
        ("outer step", step.outer_seconds, net),
        ("optimizer", step.optimizer_seconds, host),
        ("host overhead", busiest.framework_seconds + step.constants.step_seconds, host),
    )
    return tuple(
        TimeTerm(name=name, seconds=seconds, provenance=provenance)
        for name, seconds, provenance in rows
        if seconds or name not in _RARE
    )


_RARE = ("exposed activation copies", "tied weights", "outer step")  # left out if they take no time


def _idle_seconds(step: StepTerms, busiest: BusiestRank) -> float:
    """Return the idle time of the pipeline; rounding differences count as 0."""
    rest = step.pipeline_seconds - busiest.seconds
    return rest if rest > _ROUNDING * step.pipeline_seconds else 0.0


def busiest_rank(step: StepTerms) -> BusiestRank:
    """Return the times of the rank with the most work."""
    arrangement = step.arrangement
    stages: list[list[int]] = [[] for _ in range(arrangement.pipeline)]
    for stage in range(len(step.prices)):
        stages[rank_of(arrangement.schedule, stage, arrangement.pipeline)].append(stage)
    return max((_sums(step, own) for own in stages), key=lambda one: one.seconds)


def _sums(step: StepTerms, stages: Sequence[int]) -> BusiestRank:
    microbatches, action_seconds = step.arrangement.microbatches, step.constants.action_seconds
    prices = tuple(step.prices[stage] for stage in stages)
    loads = [price.load for price in prices]
    copied = sum(load.host_wait_seconds for load in loads)
    recompute = sum(load.recompute_seconds for load in loads) - copied
    tensor = sum(load.communication_seconds for load in loads)
    everything = sum(load.seconds for load in loads)
    waited = sum(price.data.forward_wait + price.data.backward_wait for price in prices)
    acting = sum(2 * action_seconds + price.seconds.split_seconds for price in prices)
    summed = sum(
        summed_seconds(step.groups.tensor, load.replicated_gradient_bytes) for load in loads
    )
    return BusiestRank(
        compute_seconds=microbatches * max(0.0, everything - recompute - copied - tensor),
        recompute_seconds=microbatches * recompute,
        host_wait_seconds=microbatches * copied,
        tensor_seconds=microbatches * tensor,
        data_seconds=microbatches * waited,
        framework_seconds=microbatches * acting,
        measured_seconds=microbatches * sum(load.measured_seconds for load in loads),
        prices=prices,
        stages=tuple(stages),
        sums_seconds=summed,
        exposed_sums_seconds=min(summed, step.last_reduction_seconds),
    )


def _provenance(busiest: BusiestRank) -> Provenance:
    computing = busiest.compute_seconds + busiest.recompute_seconds
    if not busiest.measured_seconds:
        return Provenance.FORMULA
    is_all = busiest.measured_seconds >= 0.999 * computing
    return Provenance.MEASURED if is_all else Provenance.MIXED


def communication_terms(
    step: StepTerms, transfer_wait_seconds: float
) -> tuple[CommunicationTerm, ...]:
    """Return each kind of communication of the busiest rank that takes time.

    `transfer_wait_seconds` is how much longer the pipeline takes than if tensors arrived at once.
    """
    busiest = busiest_rank(step)
    terms = (
        _tensor_term(step, busiest),
        *_data_terms(step, busiest),
        _saved_term(step, busiest),
        _replicated_term(step, busiest),
        _pipeline_term(step, busiest, transfer_wait_seconds),
        _outer_term(step, busiest),
        CommunicationTerm(
            reason="weights that the first and the last stage share",
            collective=Collective.POINT_TO_POINT,
            ranks=2,
            count=1,
            payload_bytes=step.tied_gradient_bytes,
            seconds=step.tied_seconds,
            exposed_seconds=step.tied_seconds,
        ),
    )
    return tuple(term for term in terms if term.seconds > 0)


def _tensor_term(step: StepTerms, busiest: BusiestRank) -> CommunicationTerm:
    """Return the term of the layers' own collectives; the plan's layouts determine them."""
    return CommunicationTerm(
        reason="activations split over the tensor axis",
        collective="as the layouts say",
        ranks=step.arrangement.tensor,
        count=0,
        payload_bytes=0,
        seconds=busiest.tensor_seconds,
        exposed_seconds=busiest.tensor_seconds,
    )


def _data_terms(step: StepTerms, busiest: BusiestRank) -> Iterator[CommunicationTerm]:
    """Yield the terms of the data axis; a backward's waits for gathers count as reductions."""
    arrangement = step.arrangement
    own = [price.data for price in busiest.prices]
    loads = [price.load for price in busiest.prices]
    gathers = sum(one.gathers_alone for one in own)
    reductions = sum(one.reductions_alone for one in own)
    each, parts = arrangement.microbatches, float8_parts(arrangement)
    is_sharded = arrangement.zero.divides_parameters
    waited = each * sum(one.each_forward for one in own) + step.first_gather_seconds
    yield CommunicationTerm(
        reason=_gather_words(arrangement),
        collective=Collective.ALL_GATHER if arrangement.averaging_ranks > 1 else "copy",
        ranks=arrangement.shard,
        count=sum(one.gathers for one in own),
        payload_bytes=(2 * each if is_sharded else 1)
        * sum(int(gathered_bytes(load, float8_parts=parts)) for load in loads),
        seconds=gathers,
        exposed_seconds=min(waited, gathers),
    )
    rounds = each if arrangement.reduces_each else 1
    last = step.last_reduction_seconds - busiest.exposed_sums_seconds
    exposed = each * sum(one.each_backward for one in own) + last
    yield CommunicationTerm(
        reason=_reduction_words(arrangement),
        collective=_reduction(arrangement),
        ranks=arrangement.averaging_ranks,
        count=sum(one.reductions for one in own),
        payload_bytes=rounds * sum(_sent_bytes(load, arrangement) for load in loads),
        seconds=reductions,
        exposed_seconds=min(exposed, reductions + (gathers if is_sharded else 0.0)),
    )
    statistics = sum((one.synchronising for one in own), NO_WAIT)
    seconds = each * (statistics.forward_seconds + statistics.backward_seconds)
    yield CommunicationTerm(
        reason="statistics of batch norms over the data axis",
        collective=Collective.ALL_GATHER,
        ranks=arrangement.averaging_ranks,
        count=each * statistics.collectives,
        payload_bytes=each * statistics.payload_bytes,
        seconds=seconds,
        exposed_seconds=seconds,
    )


def _outer_term(step: StepTerms, busiest: BusiestRank) -> CommunicationTerm:
    """Return the term of local steps: each has its share of an outer step."""
    arrangement = step.arrangement
    sizes = sum(price.load.gradient_bytes for price in busiest.prices)
    each = arrangement.optimizer_ranks * arrangement.sync_every
    often = f"in one of {arrangement.sync_every} steps"
    if arrangement.outer_parts > 1:
        of_part = arrangement.sync_every // arrangement.outer_parts
        often = f"a part every {of_part} steps, sent during {step.outer_delay}"
    copied = ", and copied to the host and back" if arrangement.offload.has_outer else ""
    return CommunicationTerm(
        reason=f"parameters averaged over replicas, {often}{copied}",
        collective=Collective.ALL_REDUCE,
        ranks=arrangement.data // arrangement.shard,
        count=0,
        payload_bytes=sizes // each,
        seconds=step.outer_seconds + step.outer_hidden_seconds,
        exposed_seconds=step.outer_seconds,
    )


def _reduction(arrangement: Arrangement) -> str:
    if arrangement.averaging_ranks == 1:
        return "copy"
    divides, keeps = arrangement.zero.divides_optimizer, arrangement.compression.keeps_lost
    if arrangement.compression.is_low_rank:
        return Collective.ALL_REDUCE
    if keeps and divides and arrangement.shard == arrangement.data:
        return Collective.ALL_TO_ALL
    if keeps:
        first = f"{Collective.REDUCE_SCATTER}, " if arrangement.optimizer_ranks > 1 else ""
        return f"{first}{Collective.ALL_TO_ALL}, {Collective.ALL_GATHER}"
    return Collective.REDUCE_SCATTER if divides else Collective.ALL_REDUCE


def _sent_bytes(load: StageLoad, arrangement: Arrangement) -> int:
    """Return the payload of the sum of a stage's gradients, as it is sent."""
    compression, shard = arrangement.compression, arrangement.optimizer_ranks
    whole, thin = load.whole_gradient_bytes, load.thin_gradient_bytes
    sent = sent_bytes(load.gradient_bytes, whole, thin, compression)
    if compression.keeps_lost and not compression.is_low_rank and 1 < shard < arrangement.data:
        return round(load.gradient_bytes + sent / shard)
    return round(sent)


def _gather_words(arrangement: Arrangement) -> str:
    fetched = "fetched from the host" if arrangement.shards_on_host else ""
    gathered = "gathered over the data axis" if arrangement.averaging_ranks > 1 else ""
    narrow = ", weights of float8 products in float8" if float8_parts(arrangement) else ""
    return f"parameters {' and '.join(filter(None, (fetched, gathered)))}{narrow}"


def _reduction_words(arrangement: Arrangement) -> str:
    if arrangement.averaging_ranks == 1:
        return "gradients copied to the host"
    copied = ", and copied to the host" if arrangement.offload.has_states else ""
    own = arrangement.compression
    sent = f", {own.sums}" if own is not Compression.NONE else ""
    return f"gradients summed over the data axis{sent}{copied}"


def _saved_term(step: StepTerms, busiest: BusiestRank) -> CommunicationTerm:
    """Return the copies of saved tensors to the host and back, which run beside the layers."""
    each, loads = 2 * step.arrangement.microbatches, [one.load for one in busiest.prices]
    layers = [one.count for load in loads for one in load.works if one.cost.host_saved_bytes]
    layers += [-1 for load in loads if load.staying_bytes]
    size = each * sum(load.host_saved_bytes - load.staying_bytes for load in loads)
    return CommunicationTerm(
        reason="saved activations copied to the host and back",
        collective="copy",
        ranks=1,
        count=each * sum(layers),
        payload_bytes=size,
        seconds=size / (step.groups.host.bytes_per_second * step.constants.host_link_share),
        exposed_seconds=busiest.host_wait_seconds,
    )


def _replicated_term(step: StepTerms, busiest: BusiestRank) -> CommunicationTerm:
    sizes = [price.load.replicated_gradient_bytes for price in busiest.prices]
    return CommunicationTerm(
        reason="gradients of parameters that are whole on the tensor axis",
        collective=Collective.ALL_REDUCE,
        ranks=step.arrangement.tensor,
        count=len(sizes),
        payload_bytes=sum(sizes),
        seconds=busiest.sums_seconds,
        exposed_seconds=busiest.exposed_sums_seconds,
    )


def _pipeline_term(
    step: StepTerms, busiest: BusiestRank, transfer_wait_seconds: float
) -> CommunicationTerm:
    """Return the tensors that the rank receives: activations, and their gradients."""
    received = [
        border
        for stage in busiest.stages
        for border in (stage - 1, stage)
        if 0 <= border < len(step.prices) - 1
    ]
    each = step.arrangement.microbatches
    seconds = each * sum(step.prices[border].transfer_seconds for border in received)
    return CommunicationTerm(
        reason="activations and their gradients between stages (counted as pipeline bubble)",
        collective=Collective.POINT_TO_POINT,
        ranks=2,
        count=each * len(received),
        payload_bytes=each * sum(step.prices[border].load.output_bytes for border in received),
        seconds=seconds,
        exposed_seconds=min(seconds, transfer_wait_seconds),
    )
