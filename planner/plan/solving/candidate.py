"""Solves an arrangement: which layers are on which stage, in which layouts and modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from autopar.planner.cluster.shape import (
    Kind,
    RowShare,
    different_kinds,
    kinds_of_blocks,
    shares_of,
)
from autopar.planner.costs.prediction import Arrangement, Modes, Prediction, Recompute
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.paths import Chains, first_chains
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import context_bytes
from autopar.planner.costs.steps.stage_load import rank_groups
from autopar.planner.costs.steps.step import predict
from autopar.planner.plan.plan import PlannedStage, even_stages
from autopar.planner.plan.solving.costing import PriceBook
from autopar.planner.plan.solving.prices import LayerKey
from autopar.planner.programs.layouts.choice import LinePrice
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stages.choice import EXACT, QUICK, Chooser, Effort, answered
from autopar.planner.programs.stages.modes import PricedCut
from autopar.planner.programs.stages.question import PinnedLayer, StageQuestion, within_host
from autopar.planner.programs.stages.smallest import smallest_stages

Item = TypeVar("Item")
Rows = tuple[tuple[Modes, ...], ...]  # per pipeline rank; one object for equal ranks
CLOSE_BYTES = 2**20  # more than the rounding of a bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What every candidate must respect, besides its arrangement."""

    limit_bytes: Mapping[str, int]  # per device name
    host_limit_bytes: int  # of each device's share of its host's memory
    modes: tuple[frozenset[Recompute], ...]  # allowed modes of each layer
    pins: tuple[PinnedLayer, ...]
    is_cuttable: tuple[bool, ...]  # whether a stage may end with each layer
    may_waste_ranks: bool  # the tensor degree is pinned, so its ranks may compute the same
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The input of the stage program, for arrangements of one model on one cluster."""

    costing: PriceBook
    demands: Demands
    constants: FrameworkConstants

    def of(
        self, arrangement: Arrangement, solution: int, lines: LinePrice | None = None
    ) -> StageQuestion:
        """Return the question for an arrangement, in layout solution number `solution`."""
        demands, inside = self.demands, layer_key(arrangement, solution, lines)
        sizes, rows = demands.bucket_bytes, self._rows(arrangement, inside)
        return StageQuestion(
            arrangement=arrangement,
            groups=rank_groups(self.costing.cluster_of(arrangement), arrangement),
            constants=self.constants,
            rows=rows,
            allowed=within_host(demands.modes, rows[0], arrangement, demands.host_limit_bytes),
            is_cuttable=demands.is_cuttable,
            pins=demands.pins,
            limit_bytes=self.limit_bytes(arrangement),
            tied_gradient_bytes=self.costing.tied_gradient_bytes(inside),
            bucket_bytes=sizes if arrangement.keeps_buckets else sizes[:1],
        )

    def most_bytes(self, arrangement: Arrangement) -> int:
        """Return the largest `room_bytes` of a rank."""
        return max(self.room_bytes(arrangement))

    def room_bytes(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Return each pipeline rank's limit without the context, and a MiB more for rounding."""
        more = CLOSE_BYTES - context_bytes(arrangement, self.constants)
        return tuple(limit + more for limit in self.limit_bytes(arrangement))

    def limit_bytes(self, arrangement: Arrangement) -> tuple[int, ...]:
        """Return each pipeline rank's memory limit: the least of its devices' limits."""
        limits = self.demands.limit_bytes
        kinds = self.kinds(arrangement)
        least = [min(limits[share.device.name] for share in own) for own in kinds]
        return self._each(arrangement, least)

    def rows(self, arrangement: Arrangement, solution: int) -> Rows:
        """Return the layers' costs on each pipeline rank, which waits for its slowest device."""
        return self._rows(arrangement, layer_key(arrangement, solution))

    def _rows(self, arrangement: Arrangement, inside: LayerKey) -> Rows:
        kinds = self.kinds(arrangement)
        return self._each(arrangement, [self.costing.slowest_rows(inside, own) for own in kinds])

    def kinds(self, arrangement: Arrangement) -> tuple[Kind, ...]:
        """Return the distinct kinds of pipeline ranks: their devices, each with its rows.

        If data ranks have unlike numbers of rows, all are priced with the largest number, unless
        there are only data ranks.
        """
        cluster, rows = self.costing.cluster_of(arrangement), arrangement.microbatch
        if arrangement.rows and arrangement.data == arrangement.ranks:
            return (shares_of(cluster.devices, arrangement.rows),)
        kinds = different_kinds(cluster, arrangement.pipeline)
        return tuple(tuple(RowShare(device, rows) for device in own) for own in kinds)

    def _each(self, arrangement: Arrangement, values: Sequence[Item]) -> tuple[Item, ...]:
        """Return a value for each pipeline rank, from one for each kind of rank."""
        if len(values) == 1:
            return (values[0],) * arrangement.pipeline
        degrees = self.costing.cluster_of(arrangement), arrangement.pipeline
        known = dict(zip(different_kinds(*degrees), values, strict=True))
        return tuple(known[own] for own in kinds_of_blocks(*degrees))


def layer_key(arrangement: Arrangement, solution: int, lines: LinePrice | None = None) -> LayerKey:
    """Return everything that layouts and costs inside layers depend on, besides the devices."""
    return LayerKey(
        tensor=arrangement.tensor,
        microbatch=arrangement.microbatch,
        compile=arrangement.compile,
        solution=solution,
        is_one_stage=arrangement.pipeline == 1,
        lines=lines,
    )


_ENDLESS = float("inf")
_SAME = 1e-3  # of the step: closer steps count as equal
# Prices of printed lines to try, the highest first: what all lines together cost, as a multiple of
# the allowed slowdown.
_TRIES = (8.0, 4.0, 2.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A solved arrangement."""

    arrangement: Arrangement
    solution: int  # the number of its layouts among `PriceBook.solutions`
    stages: tuple[PlannedStage, ...]
    prediction: Prediction
    lines: LinePrice | None = None  # see `LayerKey`

    @property
    def inside(self) -> LayerKey:
        """Everything that layouts and costs inside its layers depend on."""
        return layer_key(self.arrangement, self.solution, self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedArrangement:
    """The best candidate of an arrangement, and a lower bound of all its candidates.

    An infinite bound without a candidate means that nothing fits. `is_final`: more effort finds
    nothing else.
    """

    candidate: Candidate | None
    bound_seconds: float
    report: SolverReport
    is_final: bool = True


def _nothing(_: int) -> float:
    """Return 0, a lower bound of the step in any layouts."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrangementSolver:
    """Solves and predicts candidates."""

    questions: Questions
    model_flops: int
    _choosers: dict[tuple[Arrangement, int], Chooser] = field(default_factory=dict, init=False)
    _chains: dict[tuple[ScheduleKind, PipelineShape], Chains] = field(
        default_factory=dict, init=False
    )

    def under(self, demands: Demands) -> ArrangementSolver:
        """Return the solver under other demands."""
        return replace(self, questions=replace(self.questions, demands=demands))

    @property
    def costing(self) -> PriceBook:
        """The prices of layers."""
        return self.questions.costing

    @property
    def demands(self) -> Demands:
        """What every candidate must respect."""
        return self.questions.demands

    def solve(
        self,
        arrangement: Arrangement,
        *,
        least: Callable[[int], float] = _nothing,
        known_seconds: float = _ENDLESS,
        effort: Effort = EXACT,
    ) -> SolvedArrangement:
        """Return the fastest candidate of an arrangement, within the effort.

        The fastest layouts are tried first. Slower ones may need less memory, or have fewer
        gradients to sum over the data axis. They are skipped if their bound by `least` is not
        better than the best result so far, or than `known_seconds`.
        """
        best: Candidate | None = None
        bound, report, is_final = _ENDLESS, NOTHING_SOLVED, True
        for number in self._in_turn(arrangement, least):
            found_seconds = best.prediction.step_seconds if best else _ENDLESS
            known = min(found_seconds, known_seconds)
            if least(number) >= known or self._wastes_ranks(arrangement, number):
                bound = min(bound, max(known, least(number)))
                continue
            chooser = self._chooser(arrangement, number)
            chooser.ask(known, effort)
            answer = answered(chooser)
            if answer.is_final:
                del self._choosers[arrangement, number]
            report += answer.report
            is_final = is_final and answer.is_final
            bound = min(bound, answer.bound_seconds)
            if answer.best is not None and answer.best.seconds < found_seconds:
                one = self._candidate(chooser.question, number, answer.best)
                best = one if self._fits_host(one) else best
        return SolvedArrangement(
            candidate=best, bound_seconds=bound, report=report, is_final=is_final
        )

    def _chooser(self, arrangement: Arrangement, number: int) -> Chooser:
        """Return the chooser of an arrangement and layout solution, kept between calls."""
        key = arrangement, number
        if key not in self._choosers:
            question = self.questions.of(arrangement, number)
            schedule = arrangement.schedule, question.shape
            chains = self._chains.setdefault(schedule, Chains(first_chains(*schedule)))
            self._choosers[key] = Chooser(question, QUICK, chains)
        return self._choosers[key]

    def _in_turn(self, arrangement: Arrangement, least: Callable[[int], float]) -> Iterator[int]:
        """Yield the layout solutions: the fastest first, then the others by their bounds."""
        yield 0
        solutions = self.costing.solutions(arrangement)
        yield from sorted(range(1, len(solutions)), key=least)

    def solve_smallest(self, arrangement: Arrangement) -> SolvedArrangement:
        """Return the candidate with the least memory on its fullest rank, if it fits."""
        solutions = self.costing.solutions(arrangement)
        best: Candidate | None = None
        for number in range(len(solutions)):
            if self._wastes_ranks(arrangement, number):
                continue
            question = self.questions.of(arrangement, number)
            found = smallest_stages(question)
            one = self._candidate(question, number, found) if found else None
            if one and self._fits(one) and (best is None or _needed(one) < _needed(best)):
                best = one
        return SolvedArrangement(candidate=best, bound_seconds=_ENDLESS, report=NOTHING_SOLVED)

    def _wastes_ranks(self, arrangement: Arrangement, solution: int) -> bool:
        """Whether all tensor ranks would compute the same, so that fewer devices suffice."""
        if arrangement.tensor == 1 or self.demands.may_waste_ranks:
            return False
        return self.costing.solution(layer_key(arrangement, solution)).splits_nothing

    def simplified(self, candidate: Candidate, within_seconds: float) -> Candidate:
        """Return a candidate with even stages and few printed lines, if its step is short enough.

        The price of a line is halved while the step is too long. With the last price, the layers
        are slower by at most the allowed share, but the step may be longer for other reasons.
        """
        candidate = self._evened(candidate, within_seconds)
        allowed = within_seconds / candidate.prediction.step_seconds - 1
        if candidate.arrangement.tensor == 1 or allowed <= 0:
            return candidate
        own_layouts = self.costing.solution(candidate.inside).layouts
        price = LinePrice(share=0.0, microbatches=candidate.arrangement.microbatches)
        for times in _TRIES:
            price = replace(price, share=times * allowed)
            one = self._predicted_again(replace(candidate, lines=price))
            if not self._fits(one) and price.growth is None:
                price = replace(price, growth=self._growth(candidate))
                one = self._predicted_again(replace(candidate, lines=price))
            found = self.costing.solution(one.inside)
            if found.layouts == own_layouts or not self._fits(one):
                break
            if one.prediction.step_seconds <= within_seconds and not found.splits_nothing:
                return one
        return candidate

    def _evened(self, candidate: Candidate, within_seconds: float) -> Candidate:
        """Return a candidate with stages as even as possible in the same time."""
        if candidate.arrangement.stages_per_rank == 1:
            return candidate
        longest = min(within_seconds, candidate.prediction.step_seconds * (1 + _SAME))

        def with_stages(stages: tuple[PlannedStage, ...]) -> Candidate:
            return self._predicted_again(replace(candidate, stages=stages))

        def accepts(stages: tuple[PlannedStage, ...]) -> bool:
            if not self._is_allowed(stages):
                return False
            one = with_stages(stages)
            return one.prediction.step_seconds <= longest and self._fits(one)

        return with_stages(even_stages(candidate.stages, accepts))

    def _is_allowed(self, stages: Sequence[PlannedStage]) -> bool:
        """Whether stages may be cut like this, and all pinned layers lie in their stages."""
        cuttable, pins = self.demands.is_cuttable, self.demands.pins
        return all(cuttable[one.first - 1] for one in stages[1:]) and all(
            stages[pin.stage].first <= pin.layer < stages[pin.stage].first + stages[pin.stage].count
            for pin in pins
        )

    def _growth(self, candidate: Candidate) -> float:
        """Return the factor by which the memory of every stage may grow."""
        limits = self.questions.limit_bytes(candidate.arrangement)
        return min(
            limits[stage.rank] / predicted.memory.device_bytes
            for stage, predicted in zip(candidate.stages, candidate.prediction.stages, strict=True)
        )

    def _predicted_again(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the predictions of its stages and layouts."""
        question = self.questions.of(candidate.arrangement, candidate.solution, candidate.lines)
        prediction = self._predicted(question, candidate.arrangement, candidate.stages)
        return replace(candidate, prediction=prediction)

    def _candidate(self, question: StageQuestion, solution: int, found: PricedCut) -> Candidate:
        """Return the candidate of a cut, with its prediction."""
        stages = tuple(
            PlannedStage(
                rank=question.ranks[number],
                first=first,
                count=stop - first,
                recompute=found.offers[number].modes,
            )
            for number, (first, stop) in enumerate(pairwise(found.cut))
        )
        return Candidate(
            arrangement=found.arrangement,
            solution=solution,
            stages=stages,
            prediction=self._predicted(question, found.arrangement, stages),
        )

    def _predicted(
        self, question: StageQuestion, arrangement: Arrangement, stages: Sequence[PlannedStage]
    ) -> Prediction:
        costs = [
            [
                layer[mode]
                for layer, mode in zip(
                    question.rows[stage.rank][stage.first : stage.first + stage.count],
                    stage.recompute,
                    strict=True,
                )
            ]
            for stage in stages
        ]
        return predict(
            costs,
            arrangement,
            self.costing.cluster_of(arrangement),
            constants=self.questions.constants,
            model_flops=self.model_flops,
            tied_gradient_bytes=question.tied_gradient_bytes,
        )

    def _fits(self, candidate: Candidate) -> bool:
        return self._growth(candidate) >= 1 and self._fits_host(candidate)

    def _fits_host(self, candidate: Candidate) -> bool:
        """Whether every rank fits into its share of the host's memory.

        Stages are cut for the devices' memory alone: another cut might fit instead.
        """
        needed = max(one.memory.host_bytes for one in candidate.prediction.stages)
        return needed <= self.demands.host_limit_bytes


def _needed(candidate: Candidate) -> int:
    return candidate.prediction.peak_memory.device_bytes


def recomputes(candidate: Candidate) -> bool:
    """Whether any layer is computed again, or saves tensors on the host."""
    return any(mode.spares_device for stage in candidate.stages for mode in stage.recompute)
