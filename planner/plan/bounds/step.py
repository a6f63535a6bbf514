"""Lower bounds of an arrangement's step, before its stages are chosen.

For any cut of the layers, some rank has at least the mean share of computing, of parameters to
gather, and of states to update. Layers are not divided, so the slowest rank has whole layers.

In formulas, m is the number of microbatches and p of pipeline ranks; T is the slowest rank's time
for a microbatch, and Σ that of all ranks together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import (
    SCHEDULES,
    ScheduleKind,
    forwards_first,
    with_enough_rounds,
)
from autopar.planner.costs.steps.bounds import DataBound, Shared, least_step_seconds
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import layer_unsharded_bytes
from autopar.planner.costs.steps.stage_load import RankGroups, norm_seconds
from autopar.planner.costs.steps.state import host_bytes, state_bytes
from autopar.planner.plan.bounds.bottleneck import LayerBlock, Mode, RankCapacities, block
from autopar.planner.plan.bounds.least import Ladder, ladder

_HALVINGS = 8  # bisections of the slowest rank's interval


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastTotals:
    """Sums over all layers of what one tensor rank has, each at its minimum."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    trainable: int
    trainable_tensors: int
    input_gradient_seconds: float  # the part of the backward that is not deferred
    least_output_bytes: int  # the smallest output of a layer: every cut sends at least this much


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingBounds:
    """Bounds of plans that fit: the least seconds of recomputation, and of the slowest rank."""

    recompute_seconds: float
    bottleneck_seconds: float
    capacities: Callable[[], RankCapacities]  # computed when called: few schedules need them


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """Facts about the layers in some layouts, for the bounds."""

    totals: LeastTotals
    ladder: Ladder
    block: LayerBlock
    repeated: LayerCost  # one of the repeated layers
    kinds: tuple[tuple[Modes, int], ...]  # of layers, each with its count

    def state_bytes(self, arrangement: Arrangement) -> int:
        """Return the bytes of parameters, gradients and states of all layers under ZeRO."""
        return sum(
            number * state_bytes(modes[Recompute.NONE], arrangement) for modes, number in self.kinds
        )

    def host_bytes(self, arrangement: Arrangement) -> int:
        """Return the bytes in the host's memory of all layers, in all stages together."""
        return sum(
            number * host_bytes(modes[Recompute.NONE], arrangement) for modes, number in self.kinds
        )

    def least_alone_bytes(self, arrangement: Arrangement) -> int:
        """Return the least memory of a rank that holds only the layer with the largest need."""
        return max(_alone_bytes(modes, arrangement) for modes, _ in self.kinds)

    def transient_bytes(self, arrangement: Arrangement) -> int:
        """Return the least transient memory of every stage.

        With a pipeline it is 0, since a stage may lack the layers that need it. Without one, the
        single stage runs every layer. If a step has only one backward, only the need of the last
        layer counts: no other layer runs while everything is saved.
        """
        if arrangement.pipeline > 1:
            return 0
        if arrangement.is_one_pass:
            return self.ladder.last_transient_bytes
        return self.ladder.transient_bytes


def facts_of(row: Sequence[Modes]) -> LayoutFacts:
    """Return the facts of a row of layers; equal layers are one object."""
    numbers = Counter(map(id, row))
    kinds = {id(modes): modes for modes in row}
    repeated = kinds[max(numbers, key=lambda one: numbers[one])]
    return LayoutFacts(
        totals=_totals([modes[Recompute.NONE] for modes in row]),
        ladder=ladder(row),
        block=block(row),
        repeated=repeated[Recompute.NONE],
        kinds=tuple((kinds[one], number) for one, number in numbers.items()),
    )


def _alone_bytes(modes: Modes, arrangement: Arrangement) -> int:
    return state_bytes(modes[Recompute.NONE], arrangement) + min(
        one.saved_bytes + one.transient_bytes + layer_unsharded_bytes(one, arrangement)
        for one in modes.values()
    )


def _totals(plain: Sequence[LayerCost]) -> LeastTotals:
    return LeastTotals(
        forward_seconds=sum(one.forward_seconds for one in plain),
        backward_seconds=sum(one.backward_seconds for one in plain),
        input_gradient_seconds=sum(
            one.backward_seconds - one.weight_gradient_seconds for one in plain
        ),
        parameter_bytes=sum(one.parameter_bytes for one in plain),
        gradient_bytes=sum(one.gradient_bytes for one in plain),
        trainable=sum(one.trainable for one in plain),
        trainable_tensors=sum(one.trainable_tensors for one in plain),
        least_output_bytes=min((one.output_bytes for one in plain[:-1]), default=0),
    )


class StepBound:
    """The lower bound of an arrangement's step."""

    def __init__(
        self,
        arrangement: Arrangement,
        groups: RankGroups,
        constants: FrameworkConstants,
        totals: LeastTotals,
    ) -> None:
        self.arrangement, self.groups = arrangement, groups
        self.constants, self.totals = constants, totals
        self.action_seconds = constants.action_seconds
        self.data = DataBound(arrangement, groups, constants)

    def seconds(self, fitting: FittingBounds, repeated: LayerBlock) -> float:
        """Return the lower bound over all choices of stages."""
        totals = self.totals
        backward = totals.backward_seconds + fitting.recompute_seconds
        return (
            self._computing(fitting, repeated)
            + self.data.first_forward_more(totals.forward_seconds, totals.parameter_bytes)
            + self.data.last_backward_more(backward, totals.gradient_bytes)
            + self._updating()
            + self.constants.step_seconds
        )

    def shared(self, repeated: LayerBlock) -> LayerBlock:
        """Return the repeated layers, with the time that data parallelism adds to a microbatch.

        A stage waits for the longer of computing and collectives. If collectives may take longer,
        they may hide the time of the other layers, which the bound then does not count.
        """
        is_waiting = self._is_waiting(repeated)
        modes = tuple(self._shared(mode, repeated) for mode in repeated.modes)
        return replace(repeated, others=() if is_waiting else repeated.others, modes=modes)

    def _shared(self, mode: Mode, repeated: LayerBlock) -> Mode:
        """Return a mode of a repeated layer with the time that data parallelism adds."""
        gradients, tensors = repeated.gradient_bytes, repeated.trainable_tensors
        one = Shared(
            parameter_bytes=repeated.parameter_bytes,
            gradient_bytes=gradients,
            trainable_tensors=tensors,
        )
        forward = self.data.forward(mode.forward_seconds, one)
        backward = self.data.backward(mode.backward_seconds, one)
        computing = mode.seconds + self.data.gradients(gradients, tensors)
        return Mode(
            forward_seconds=forward,
            backward_seconds=max(backward, computing - forward),
            weight_gradient_seconds=mode.weight_gradient_seconds,
            saved_bytes=mode.saved_bytes,
            transient_bytes=mode.transient_bytes,
        )

    def _is_waiting(self, repeated: LayerBlock) -> bool:
        """Whether a stage's collectives may take longer than its computing."""
        return any(
            self.data.is_waiting(
                forward_seconds=mode.forward_seconds,
                backward_seconds=mode.backward_seconds,
                parameter_bytes=repeated.parameter_bytes,
                gradient_bytes=repeated.gradient_bytes,
            )
            for mode in repeated.modes
        )

    def rank_seconds(self, layers_seconds: float) -> float:
        """Return a rank's time for a microbatch, from its layers, actions and transfers."""
        arrangement = self.arrangement
        acting = 2 * arrangement.stages_per_rank * self.action_seconds
        return layers_seconds + acting + (self._transfer() if self._is_on_demand else 0.0)

    @property
    def _is_on_demand(self) -> bool:
        """Whether a rank waits for the tensors that it receives, at least one per microbatch."""
        return self.arrangement.pipeline > 1 and self.arrangement.schedule.has_closed_form

    def _transfer(self) -> float:
        return self.groups.transfer_seconds(self.totals.least_output_bytes)

    def _computing(self, fitting: FittingBounds, repeated: LayerBlock) -> float:
        """Return the least time of the pipeline: at least m · T, for the slowest rank.

        For 1F1B and GPipe see also `_in_turn`. Other schedules take at least the time of one
        microbatch (`_through`), and at least the mean rank's computing, m · Σ ÷ p, plus its waiting
        (`_mean_wait_seconds`, `_filling`).
        """
        arrangement = self.arrangement
        microbatches, ranks = arrangement.microbatches, arrangement.pipeline
        stages = ranks * arrangement.stages_per_rank
        alone = max(sum(self._passes(fitting, repeated)), self._computed(fitting))
        alone += 2 * stages * self.action_seconds
        if self._is_on_demand:
            alone += 2 * (stages - 1) * self._transfer()
        slowest = self.rank_seconds(fitting.bottleneck_seconds)
        least = microbatches * slowest
        if self._is_on_demand:
            return max(least, least_step_seconds(alone, arrangement), self._in_turn(alone, slowest))
        waiting = _mean_wait_seconds(arrangement, repeated) if ranks > 1 else 0.0
        even = microbatches * alone / ranks
        filling = self._filling(even, fitting, repeated) if self._is_split_in_turn else 0.0
        return max(least, self._through(fitting, repeated), even + waiting, filling)

    def _computed(self, fitting: FittingBounds) -> float:
        """Return what one microbatch computes in all layers together."""
        totals = self.totals
        passes = totals.forward_seconds + totals.backward_seconds
        return passes + fitting.recompute_seconds + self._gradients

    @property
    def _gradients(self) -> float:
        return self.data.gradients(self.totals.gradient_bytes, self.totals.trainable_tensors)

    def _through(self, fitting: FittingBounds, repeated: LayerBlock) -> float:
        """Return a microbatch's time through all stages and back.

        No stage waits for the weight gradients of split backwards.
        """
        forward, backward = self._passes(fitting, repeated)
        if SCHEDULES[self.arrangement.schedule].splits_backward:
            backward -= self.totals.backward_seconds - self.totals.input_gradient_seconds
            backward -= self._gradients
        return forward + backward

    def _passes(self, fitting: FittingBounds, repeated: LayerBlock) -> tuple[float, float]:
        """Return the seconds of one microbatch's forward and backward in all layers together.

        Every stage begins with a different layer. `borders` is the least number of stages that
        begin with a repeated layer: all stages, less one for each of the other layers.
        """
        stages = self.arrangement.pipeline * self.arrangement.stages_per_rank
        everything = Shared(
            parameter_bytes=self.totals.parameter_bytes,
            gradient_bytes=self.totals.gradient_bytes,
            trainable_tensors=self.totals.trainable_tensors,
            each_parameter_bytes=repeated.parameter_bytes,
            each_gradient_bytes=repeated.gradient_bytes,
            count=repeated.count,
            borders=max(0, stages - len(repeated.others)),
        )
        backward = self.totals.backward_seconds + fitting.recompute_seconds
        return (
            self.data.forward(self.totals.forward_seconds, everything),
            self.data.backward(backward, everything),
        )

    @property
    def _is_split_in_turn(self) -> bool:
        """Whether backwards are split, and each rank of the pipeline has one stage."""
        arrangement = self.arrangement
        is_split = SCHEDULES[arrangement.schedule].splits_backward
        return is_split and arrangement.stages_per_rank == 1 and arrangement.pipeline > 1

    def _filling(self, even: float, fitting: FittingBounds, repeated: LayerBlock) -> float:
        """Return the bound of zero bubble with one stage per rank, with the time to fill the ranks.

        f_s and i_s are the seconds of a forward and of input gradients on rank s. Before its first
        backward, rank r computes K_r forwards (min(m, p − r) in ZB-H1). This backward comes after
        all forwards of a microbatch, and after the input gradients of the ranks behind r. So rank r
        is idle for

            Σ_s f_s  +  Σ_{s > r} i_s  −  K_r · f_r

        and the ranks on average for W = Σ_s ((1 − K_s ÷ p) · f_s + s ÷ p · i_s). Light stages at
        the end reduce this, but then other ranks have more to do. The bound is the minimum of max(m
        · T, m · Σ ÷ p + W(T)) over the slowest rank's time T, which limits how many layers each
        rank can hold.
        """
        microbatches, ranks = self.arrangement.microbatches, self.arrangement.pipeline
        plain = repeated.modes[0]
        again = max(0.0, *(mode.seconds - plain.seconds for mode in repeated.modes))
        behind = [rank / ranks for rank in range(ranks)]
        shape = PipelineShape(ranks=ranks, stages_per_rank=1, microbatches=microbatches)
        kind = self.arrangement.schedule
        held = [
            1.0 - first / ranks for first in forwards_first(kind, with_enough_rounds(kind, shape))
        ]
        gradient = plain.backward_seconds - plain.weight_gradient_seconds
        weights = [
            plain.forward_seconds * forward + gradient * backward
            for forward, backward in zip(held, behind, strict=True)
        ]
        recomputed = fitting.recompute_seconds / again if again else 0.0

        least = fitting.capacities().least

        def waiting(slowest: float) -> float:
            return least(weights, repeated.count, within_seconds=slowest) + again * least(
                behind, min(recomputed, repeated.count), within_seconds=slowest
            )

        low = fitting.bottleneck_seconds
        if microbatches * self.rank_seconds(low) >= even + waiting(low):
            return microbatches * self.rank_seconds(low)
        high = (even + waiting(low)) / microbatches
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_less = microbatches * self.rank_seconds(middle) < even + waiting(middle)
            low, high = (middle, high) if is_less else (low, middle)
        return microbatches * self.rank_seconds(low)

    def _in_turn(self, alone: float, slowest: float) -> float:
        """Return the bound of GPipe, (m − 1) · T + Σ, or of 1F1B, (m − 1) · T + Σ − (p · T − Σ).

        The latter holds for m > p. Let s be the slowest of the p stages of 1F1B. It waits for all
        stages before it, and twice for those after it: with the first and the last microbatch.
        Meanwhile it computes for (p − 1 − s) · T at most:

            Σ_before + m · T + 2 · Σ_after − (p − 1 − s) · T,   where Σ_before ≤ s · T
        """
        microbatches, ranks = self.arrangement.microbatches, self.arrangement.pipeline
        whole = (microbatches - 1) * slowest + alone
        if self.arrangement.schedule is ScheduleKind.GPIPE:
            return whole
        if microbatches <= ranks:
            return 0.0
        return whole - max(0.0, ranks * slowest - alone)

    def _updating(self) -> float:
        norm = norm_seconds(self.groups, self.arrangement)
        return norm + self.data.updating(self.totals.trainable)


def _mean_wait_seconds(arrangement: Arrangement, repeated: LayerBlock) -> float:
    """Return how long ranks wait for their first microbatch and after their last, on average.

    Rank r waits for r stages of one layer or more. Stages without repeated layers count 0. A
    zero-bubble schedule fills the wait after the last microbatch with weight gradients.
    """
    plain = repeated.modes[0]
    each = plain.forward_seconds
    if not SCHEDULES[arrangement.schedule].splits_backward:
        each += plain.backward_seconds
    waited = range(arrangement.pipeline)
    stages = sum(max(0, rank - len(repeated.others)) for rank in waited)
    return each * stages / arrangement.pipeline
