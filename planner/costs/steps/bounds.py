"""Lower bounds of a step and of its data parallelism, known before anything is solved.

Data parallelism delays the passes of a stage, whatever its layers are. If layers compute for c,
copy for k, and use collectives for t, the passes take at least

    max(t, c + k + t · q ÷ (1 + q))        for the slowdown q of computing beside a collective

If collectives overlap with nothing for a part t' of t, then t' ÷ (1 + q) is added. A stage of
ZeRO-3 gathers its first layer before it computes, and scatters its last gradients after it has
computed.

ZeRO-3 gathers in every pass and scatters in every backward. ZeRO-2 scatters in every backward.
ZeRO-1 and 0 reduce in a step's last backward, or in every one if gradients go to the host. ZeRO-1
gathers before the first forward, ZeRO-2 during it.
The collectives in every pass are one per layer; the others are bounded over all ways to divide
their bytes among layers and buckets.

The bound of a step's time uses totals over all layers, and holds for every cut into stages. The
search prunes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.collectives.choice import least_seconds
from autopar.planner.costs.kernels.rates import Throughput
from autopar.planner.costs.prediction import Arrangement, LayerCost
from autopar.planner.costs.steps.framework import (
    STEP_BYTES,
    FrameworkConstants,
    gradient_seconds,
    to_host_byte_seconds,
    update_seconds,
)
from autopar.planner.costs.steps.overlap import Seconds, largest_bucket, summing
from autopar.planner.costs.steps.stage_load import RankGroups
from autopar.planner.costs.steps.stage_price import copy_byte_seconds
from autopar.planner.costs.steps.state import float8_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Bytes of parameters and gradients of some layers, in total and of each of `count` equal ones.

    At least `borders` stages begin with one of the equal layers, and as many end with one.
    """

    parameter_bytes: int
    gradient_bytes: int
    trainable_tensors: int
    each_parameter_bytes: int = 0
    each_gradient_bytes: int = 0
    count: int = 0
    borders: int = 0

    @property
    def other_parameter_bytes(self) -> int:
        """Parameters of the layers other than the equal ones."""
        return max(0, self.parameter_bytes - self.count * self.each_parameter_bytes)

    @property
    def other_gradient_bytes(self) -> int:
        """Gradients of the layers other than the equal ones."""
        return max(0, self.gradient_bytes - self.count * self.each_gradient_bytes)


class DataBound:
    """The least time that data parallelism adds to an arrangement's passes."""

    def __init__(
        self,
        arrangement: Arrangement,
        groups: RankGroups,
        constants: FrameworkConstants,
    ) -> None:
        self.arrangement, self.groups, self.constants = arrangement, groups, constants
        self.least_share = 0.5 if float8_parts(arrangement) else 1.0  # of parameters' bytes
        self.slowing = constants.overlap_slowdown / (1.0 + constants.overlap_slowdown)
        self.copy_byte_seconds = copy_byte_seconds(groups.fastest_rates)
        every = (rates for own in groups.stage_rates for rates in own)
        parts = groups.shard.ranks if arrangement.zero.divides_optimizer else 1
        self.to_host = to_host_byte_seconds(arrangement, constants, groups.host) / parts
        self._different_rates = list({id(rates): rates for rates in every}.values())

    @property
    def is_in_every_pass(self) -> bool:
        """Whether every microbatch waits for collectives, not only the first and the last one."""
        return self.arrangement.reduces_each and self.arrangement.averaging_ranks > 1

    def forward(self, computing_seconds: float, shared: Shared) -> float:
        """Return the least time of a forward of layers."""
        if not self._gathers_always:
            return computing_seconds
        copied = self._copied_out(shared.parameter_bytes)
        alone = shared.borders * self._gather(shared.each_parameter_bytes)
        return self._overlapped(computing_seconds + copied, self._gathers(shared), alone=alone)

    def backward(self, computing_seconds: float, shared: Shared) -> float:
        """Return the least time of a backward of layers."""
        computing_seconds += self.gradients(shared.gradient_bytes, shared.trainable_tensors)
        if not self.is_in_every_pass:
            return computing_seconds
        if not self.arrangement.zero.shards_modules:  # buckets of any number of layers
            return self._overlapped(computing_seconds, self._reduced(shared.gradient_bytes))
        scatter = self._reduced(shared.each_gradient_bytes)
        scatters = shared.count * scatter + self._reduced(shared.other_gradient_bytes)
        copied = self._sent(shared.gradient_bytes) * self.copy_byte_seconds
        if not self._gathers_always:
            return self._overlapped(computing_seconds, scatters) + copied
        copied += self._copied_out(shared.parameter_bytes)
        gather = self._gather(shared.each_parameter_bytes)
        return self._overlapped(
            computing_seconds + copied,
            self._gathers(shared) + scatters,
            alone=shared.borders * (gather + scatter),
        )

    def each_forward_more(self, cost: LayerCost) -> float:
        """Return what data parallelism adds to a layer's forward; a stage has the sum of these."""
        if not self._gathers_always:
            return 0.0
        gather = self._gather(cost.parameter_bytes)
        return self._copied_out(cost.parameter_bytes) + self.slowing * gather

    def each_backward_more(self, cost: LayerCost) -> float:
        """Return what gradients and data parallelism add to one layer's backward."""
        gradients = self.gradients(cost.gradient_bytes, cost.trainable_tensors)
        if not (self.is_in_every_pass and self.arrangement.zero.shards_modules):
            return gradients
        copied = self._sent(cost.gradient_bytes) * self.copy_byte_seconds
        reduced = self.slowing * self._reduced(cost.gradient_bytes)
        return gradients + copied + reduced + self.each_forward_more(cost)

    def gradients(self, gradient_bytes: int, tensors: int) -> float:
        """Return the least that a backward takes to cast gradients and to add them up."""
        return min(
            gradient_seconds(gradient_bytes, tensors, self.arrangement, self.constants, rates)
            for rates in self._different_rates
        )

    def is_waiting(
        self,
        *,
        forward_seconds: float,
        backward_seconds: float,
        parameter_bytes: int,
        gradient_bytes: int,
    ) -> bool:
        """Whether the collectives of a pass may take as long as its computing, or longer."""
        if not self.is_in_every_pass:
            return False
        gather = self._gather(parameter_bytes) if self._gathers_always else 0.0
        return (
            self._gathers_always and forward_seconds <= gather
        ) or backward_seconds <= gather + self._reduced(gradient_bytes)

    def first_forward_more(self, computing_seconds: float, parameter_bytes: int) -> float:
        """Return what gathering updated parameters adds to the first forward of a single stage."""
        arrangement = self.arrangement
        is_gathered = arrangement.zero.gathers_updated or arrangement.zero.keeps_gathered
        if arrangement.averaging_ranks == 1 or arrangement.pipeline > 1 or not is_gathered:
            return 0.0
        gather = self._gather(parameter_bytes)
        if arrangement.zero.gathers_updated:
            return gather
        more = self._overlapped(computing_seconds, gather) - computing_seconds
        return more + self._copied_out(parameter_bytes)

    def last_backward_more(self, computing_seconds: float, gradient_bytes: int) -> float:
        """Return what reducing adds to the last backward, for a single stage."""
        arrangement = self.arrangement
        if arrangement.averaging_ranks == 1 or self.is_in_every_pass or arrangement.pipeline > 1:
            return 0.0
        reduced = self._reduced(gradient_bytes)
        return self._overlapped(computing_seconds, reduced) - computing_seconds

    def most_reduced(self, layers_bytes: Sequence[int], bucket_bytes: int) -> float:
        """Return the most fp32 bytes of gradients that a bucket can send, from those of each layer.

        Compression sends a share of fp32 bytes; a layer that is not compressed sends 1 ÷ share
        times as much.
        """
        share = self.arrangement.compression.share or 1.0
        if share == 1.0:
            return largest_bucket(layers_bytes[::-1], bucket_bytes)
        return min(sum(layers_bytes), bucket_bytes + max(layers_bytes) / share)

    def most_gathered(self, layers_bytes: Sequence[int], bucket_bytes: int) -> float:
        """Return the most bytes of parameters in one bucket, by the same argument."""
        if self.least_share == 1.0:
            return largest_bucket(layers_bytes, bucket_bytes)
        return min(sum(layers_bytes), (bucket_bytes + max(layers_bytes)) / self.least_share)

    def each_reduction(self, gradient_bytes: int, most_bytes: float) -> float:
        """Return the least that a layer adds to the reductions of a stage's buckets.

        Each byte takes at least as long as in one reduction of `most_bytes`, the most that a bucket
        can have.
        """
        if not (self.arrangement.has_buckets and most_bytes):
            return 0.0
        return gradient_bytes * self._reduced(most_bytes) / most_bytes

    def last_reduction(self, first_gradient_bytes: int) -> float:
        """Return the least time of a stage's last reduction, from the gradients of its first layer.

        They are in the last bucket, because a bucket has whole layers.
        """
        return self._reduced(first_gradient_bytes) if self.arrangement.has_buckets else 0.0

    def each_sum(self, replicated_bytes: int, most_bytes: int) -> float:
        """Return the least that a layer adds to its stage's sums over the tensor axis."""
        if not replicated_bytes:
            return 0.0
        whole = least_seconds(Collective.ALL_REDUCE, most_bytes, self.groups.tensor)
        return replicated_bytes * whole / most_bytes

    def each_first_gather(self, parameter_bytes: int, most_bytes: float) -> float:
        """Return the least that a layer adds to the gathers before a stage's first forward."""
        arrangement = self.arrangement
        is_gathered = arrangement.zero.gathers_updated and arrangement.averaging_ranks > 1
        if not (is_gathered and most_bytes):
            return 0.0
        return parameter_bytes * self._gather(most_bytes) / most_bytes

    def updating(self, trainable: int) -> float:
        """Return the least optimizer seconds of the rank that has most trainable elements.

        Each of a rank's stages is updated by itself, and the cache saves it no more than the time
        of what fits there.
        """
        arrangement, host = self.arrangement, self.groups.host
        are_many = arrangement.stages_per_rank > 1 and not arrangement.offload.has_states
        caches = arrangement.stages_per_rank if are_many else 0
        mean = trainable / arrangement.pipeline

        def least(rates: Throughput) -> float:
            cached = caches * rates.cache_bytes / STEP_BYTES * arrangement.optimizer_ranks
            streamed = max(0.0, mean - cached)
            return update_seconds(streamed, arrangement, self.constants, rates=rates, host=host)

        return min(max(map(least, own)) for own in dict.fromkeys(self.groups.stage_rates))

    @property
    def _gathers_always(self) -> bool:
        return self.arrangement.zero.divides_parameters and self.arrangement.averaging_ranks > 1

    def _gathers(self, shared: Shared) -> float:
        each = shared.count * self._gather(shared.each_parameter_bytes)
        return each + self._gather(shared.other_parameter_bytes)

    def _overlapped(self, computing: float, communicating: float, *, alone: float = 0.0) -> float:
        beside = communicating - alone
        return max(communicating, computing + alone + self.slowing * beside)

    def _copied_out(self, parameter_bytes: int) -> float:
        """Return the time of copying gathered parameters out of their buffer."""
        return self.least_share * parameter_bytes * self.copy_byte_seconds

    def _sent(self, gradient_bytes: float) -> float:
        return gradient_bytes * self.arrangement.compression.share

    def _gather(self, parameter_bytes: float) -> float:
        sent = self.least_share * parameter_bytes
        return least_seconds(Collective.ALL_GATHER, sent, self.groups.shard)

    def _reduced(self, gradient_bytes: float) -> float:
        """Return the least time of reducing gradients, and of copying this rank's part away."""
        is_divided = self.arrangement.zero.divides_optimizer
        parts = self.groups.shard if is_divided else None
        copies = self.groups.replicas if is_divided else self.groups.data
        compression = self.arrangement.compression
        sent = summing(_least, parts, copies, compression)(self._sent(gradient_bytes))
        return sent + self.to_host * gradient_bytes


def _least(collective: Collective, shape: GroupShape) -> Seconds:
    return lambda size: least_seconds(collective, size, shape)


def least_step_seconds(layers_seconds: float, arrangement: Arrangement) -> float:
    """Return a lower bound of the step for all cuts, from one microbatch's forward and backward.

    GPipe and 1F1B: stage s computes nothing before the first microbatch has passed the stages
    before it, nor after the last one has begun its way back through them, so T ≥ Σ_{j<s} t_j +
    m·t_s. If these bounds are equal for all p stages, with Σ t = L:

        T = L ÷ (1 − (1 − 1/m)^p)

    and no other cut makes the greatest of them smaller. Other schedules: the larger of L and m·L ÷
    p. Leaves out all communication, the optimizer and the framework.
    """
    microbatches, ranks = arrangement.microbatches, arrangement.pipeline
    if ranks == 1:
        return microbatches * layers_seconds
    if arrangement.schedule.has_closed_form:
        return layers_seconds / (1.0 - (1.0 - 1.0 / microbatches) ** ranks)
    return max(layers_seconds, microbatches * layers_seconds / ranks)
