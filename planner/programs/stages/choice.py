"""Chooses the stages of one arrangement: bounds, prices, improves, until bound and best meet.

    floors      shortest paths bound all cuts (one stage per rank), and close most intervals
    a cut       the one of the bound, priced exactly, its borders moved while that helps
    program     the cut of the least bound among those not priced yet; it is priced, left out, and
                what decides how long it takes becomes a row

The program's bound rises until it reaches the best cut known: no better one exists. Where this is
not reached within the effort, the bound says how much better one might be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopar.planner.costs.schedules.paths import first_chains, longest_chains
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.rank_groups import norm_seconds
from autopar.planner.costs.steps.step import tied_seconds
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stages.columns import Column, Columns
from autopar.planner.programs.stages.floors import Floors, floors_of
from autopar.planner.programs.stages.modes import CutAnswer, PricedCut, price_cut
from autopar.planner.programs.stages.program import StageProgram
from autopar.planner.programs.stages.question import Cut, StageQuestion

_RELAXATIONS = 3  # of a program, each with what decides the cut that the one before rounds to
_BETTER = 1.0 - 1e-9  # of the best cut: what is not below this is no better


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is done for one arrangement."""

    cuts: int  # priced after the program has chosen them
    program_seconds: float
    gap: float  # as a share: bound and best need not meet closer than that
    most_columns: int  # of a program; a larger one is not asked


QUICK = Effort(cuts=0, program_seconds=0.0, gap=1.0, most_columns=0)
THOROUGH = Effort(cuts=4, program_seconds=5.0, gap=5e-3, most_columns=2_000)
EXACT = Effort(cuts=60, program_seconds=10.0, gap=1e-7, most_columns=400)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnswer:
    """The best cut found below the cutoff, if any, and what no cut beats.

    An infinite bound: nothing fits.
    """

    best: PricedCut | None
    bound_seconds: float
    report: SolverReport


def choose_stages(
    question: StageQuestion, *, cutoff_seconds: float = math.inf, effort: Effort = EXACT
) -> StageAnswer:
    """Return the best cut of the layers into stages, with its modes, and the bound."""
    chooser = _Chooser(question, cutoff_seconds, effort)
    return chooser.whole() if question.shape.stages == 1 else chooser.pipelined()


class _Chooser:
    """One question on its way to an answer."""

    def __init__(self, question: StageQuestion, cutoff_seconds: float, effort: Effort) -> None:
        self.question, self.effort = question, effort
        self.columns = Columns(question)
        self.cutoff = cutoff_seconds
        self.best: PricedCut | None = None
        self.report = NOTHING_SOLVED
        self.once = (
            tied_seconds(question.groups, question.arrangement, question.tied_gradient_bytes)
            + norm_seconds(question.groups, question.arrangement)
            + question.constants.step_seconds
        )
        self._priced: dict[Cut, CutAnswer] = {}

    @property
    def aim(self) -> float:
        """What a cut has to be below."""
        return min(self.cutoff, self.best.seconds if self.best else math.inf) * _BETTER

    def whole(self) -> StageAnswer:
        """Return the best way to run all layers as one stage."""
        if any(first > last for first, last in self.question.windows):
            return self._answer(math.inf)
        cut = (0, len(self.question.classes))
        answer = self.price(cut)
        if self.best is None:
            return self._answer(math.inf)
        return self._answer(self.best.seconds if answer.is_whole else self._least_whole())

    def _least_whole(self) -> float:
        """Return what ways to run one stage take at least, those included that are not offered."""
        assert self.best is not None
        offers = self.columns.offers.of(0, self.question.classes)
        every = self.question.shape.microbatches
        exact = self.best.offers[0]
        others = self.best.seconds - every * float(exact.times[:2].sum())
        others -= max(one.reduction_seconds for one in exact.prices)
        return min(
            every * float(one.least_times[:2].sum()) + one.least_reduction_seconds + others
            for one in offers
        )

    def pipelined(self) -> StageAnswer:
        """Return the best cut into several stages."""
        if any(first > last for first, last in self.question.windows):
            return self._answer(math.inf)
        longest = self._first_longest()
        if self.question.shape.stages_per_rank > 1:
            self._improved_from(self._even_cut())
            if not self.effort.most_columns:
                return self._answer(0.0)
        while True:
            columns = self._columns(longest)
            floors = self._floors(columns)
            if floors is not None and floors.cut:
                self._improved_from(floors.cut)
            elif floors is None and self.aim == math.inf:
                self._by_program(columns)
            needed = self._longest_that_matters(longest)
            if needed <= longest:
                break
            longest = needed if self.aim < math.inf else min(needed, 2 * longest)
        return self._decided(columns, floors)

    def price(self, cut: Cut) -> CutAnswer:
        """Return what comes of a cut, and keep it if it is the best."""
        if cut not in self._priced:
            answer = price_cut(self.columns, cut)
            self._priced[cut] = answer
            best = self.best.seconds if self.best else math.inf
            if answer.best and answer.best.seconds < best:
                self.best = answer.best
        return self._priced[cut]

    def _answer(self, bound: float) -> StageAnswer:
        return StageAnswer(best=self.best, bound_seconds=bound, report=self.report)

    def _first_longest(self) -> int:
        count, stages = len(self.question.classes), self.question.shape.stages
        return min(count - stages + 1, 1 + -(-4 * count // (3 * stages)))

    def _columns(self, longest: int) -> list[Column]:
        return self.columns.of_all(
            (stage, first, stop)
            for stage in range(self.question.shape.stages)
            for first, stop in self.question.intervals(stage, longest)
        )

    def _floors(self, columns: list[Column]) -> Floors | None:
        """Return the bounds of whole steps; None where ranks have several stages."""
        if self.question.shape.stages_per_rank > 1 or not columns:
            return None
        floors = floors_of(self.question, columns, self.columns.transfers)
        stage = np.array([one.stage for one in columns])
        updating = np.array([one.offer.optimizer_seconds for one in columns])
        reducing = np.array([one.offer.least_reduction_seconds for one in columns])
        stages = range(self.question.shape.stages)
        least = max(float(updating[stage == p].min(initial=math.inf)) for p in stages)
        closed = (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
        if self.question.arrangement.schedule in closed:
            first = float(reducing[stage == 0].min(initial=math.inf))
            behind = np.where(stage == 0, reducing, first)
        else:
            first, behind = 0.0, np.zeros(len(columns))
        return Floors(
            seconds=floors.seconds + first + least + self.once,
            of_columns=floors.of_columns + behind + np.maximum(updating, least) + self.once,
            cut=floors.cut,
        )

    def _longest_that_matters(self, longest: int) -> int:
        """Return the most layers of a stage in a cut below the aim.

        A rank with a stage of more than that, and one layer or more on each of its others, is busy
        for longer alone.
        """
        count, stages = len(self.question.classes), self.question.shape.stages
        most = count - stages + 1
        if self.aim == math.inf:
            return most
        least = self._least_seconds()
        sums = np.concatenate([[0.0], np.cumsum(least)])
        others = (self.question.shape.stages_per_rank - 1) * float(least.min())
        room = (self.aim - self.once) / self.question.shape.microbatches - others
        for length in range(longest, most):
            if float((sums[length + 1 :] - sums[: -length - 1]).min()) >= room:
                return length
        return most

    def _least_seconds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return what each layer takes at least, in any mode on any rank."""
        question = self.question
        kinds = dict.fromkeys(question.kinds)
        least = [
            min(
                cost.forward_seconds + cost.backward_seconds
                for kind in kinds
                for cost in question.layer(kind, number).values()
            )
            for number in range(len(question.examples))
        ]
        return np.array([least[number] for number in question.classes])

    def _even_cut(self) -> Cut:
        """Return a cut whose stages take about the same, where they may meet."""
        stages = self.question.shape.stages
        sums = np.concatenate([[0.0], np.cumsum(self._least_seconds())])
        wanted = sums[-1] * np.arange(1, stages) / stages
        return self._nearest(np.interp(wanted, sums, np.arange(len(sums))).tolist())

    def _nearest(self, borders: Sequence[float]) -> Cut:
        """Return the cut whose borders lie nearest to some, where stages may meet; or none."""
        question, cut = self.question, [0]
        for stage, wanted in enumerate(borders, start=1):
            first, last = question.windows[stage]
            places = [
                place
                for place in range(max(first, cut[-1] + 1), last + 1)
                if question.is_border[place]
            ]
            if not places:
                return ()
            cut.append(min(places, key=lambda place: abs(place - wanted)))
        return (*cut, len(question.classes))

    def _improved_from(self, cut: Cut) -> None:
        """Price a cut, then move one border at a time while that makes the step shorter."""
        if not cut:
            return
        answer = self.price(cut)
        is_quick = self.question.arrangement.schedule in (
            ScheduleKind.GPIPE,
            ScheduleKind.ONE_F_ONE_B,
        )
        here = answer.best
        for _ in range(len(cut) if is_quick else 0):
            moves = (self.price(other).best for other in self._moved(cut))
            better = min((one for one in moves if one), key=lambda one: one.seconds, default=None)
            if better is None or (here and better.seconds >= here.seconds):
                return
            here, cut = better, better.cut

    def _moved(self, cut: Cut) -> Iterator[Cut]:
        """Yield the cuts in which one border lies a layer off."""
        for border in range(1, len(cut) - 1):
            first, last = self.question.windows[border]
            for place in (cut[border] - 1, cut[border] + 1):
                is_between = cut[border - 1] < place < cut[border + 1]
                if is_between and first <= place <= last and self.question.is_border[place]:
                    yield (*cut[:border], place, *cut[border + 1 :])

    def _decided(self, columns: list[Column], floors: Floors | None) -> StageAnswer:
        """Let the program choose cuts until its bound meets the best one, or effort is spent."""
        bound = 0.0
        if floors is not None:
            if floors.seconds == math.inf:
                return self._answer(math.inf)
            if floors.seconds >= self.aim:
                return self._answer(self._top)
            is_open = floors.of_columns < self.aim
            columns = [one for one, own in zip(columns, is_open.tolist(), strict=True) if own]
            bound = floors.seconds
        if not self.effort.most_columns:
            return self._answer(bound)
        if len({one.stage for one in columns}) < self.question.shape.stages:
            return self._answer(self._top if self.aim < math.inf else math.inf)
        return self._answer(max(bound, self._by_program(columns)))

    @property
    def _top(self) -> float:
        """What no cut beats, where all those below the aim are ruled out."""
        return min(self.cutoff, self.best.seconds if self.best else math.inf)

    def _by_program(self, columns: list[Column]) -> float:
        """Return the bound of all cuts that are made of some columns."""
        question = self.question
        program = StageProgram(
            question,
            columns,
            unit_seconds=self.aim if self.aim < math.inf else self._unit(columns),
            merges_runs=question.shape.stages_per_rank > 1 and not question.pins,
        )
        chains = first_chains(question.arrangement.schedule, question.shape)
        for chain in chains:
            program.add_chain(chain)
        for answer in self._priced.values():
            self._tighten(program, answer)
        for cut, answer in self._priced.items():
            if answer.is_whole:
                program.exclude(cut)
        bound = self._by_relaxation(program)
        if bound >= self.aim - self.effort.gap * self._top:
            return min(bound, self._top)
        share = 5 if question.shape.stages_per_rank > 1 else 1  # memory rows make it branch early
        if share * program.size > self.effort.most_columns:
            return min(bound, self._top)
        doubtful = math.inf  # the least bound of cuts whose modes were not all compared
        for _ in range(self.effort.cuts):
            if self.aim < math.inf:
                program.below(self.aim - self.once)
            decision = program.solve(
                time_limit_seconds=self.effort.program_seconds, gap=self.effort.gap
            )
            self.report += decision.report
            bound = max(bound, decision.bound_seconds + self.once)
            if bound >= self.aim - self.effort.gap * self._top or not decision.columns:
                return min(doubtful, self._top if bound >= self.aim else bound)
            cut = (*(one.first for one in decision.columns), len(question.classes))
            is_known = cut in self._priced
            answer = self.price(cut)
            self._tighten(program, answer)
            if answer.is_whole or is_known:
                doubtful = doubtful if answer.is_whole else min(doubtful, bound)
                program.exclude(cut)
        return min(doubtful, bound, self._top)

    def _by_relaxation(self, program: StageProgram) -> float:
        """Return the bound of divisible stages; price what they round to, where ranks have several.

        That takes little time, and often suffices: what has to be computed again hardly depends on
        where stages meet.
        """
        bound = 0.0
        for _ in range(_RELAXATIONS):
            relaxed = program.relaxed(time_limit_seconds=self.effort.program_seconds)
            bound = max(bound, relaxed.bound_seconds + self.once)
            if not relaxed.lengths or self.question.shape.stages_per_rank == 1:
                break
            cut = self._rounded(relaxed.lengths)
            if not cut or cut in self._priced:
                break
            self._tighten(program, self.price(cut))
        return bound

    def _rounded(self, lengths: Sequence[float]) -> Cut:
        """Return the cut whose borders are nearest to those of divisible stages."""
        return self._nearest([0.0, *accumulate(lengths)][1:-1])

    def _tighten(self, program: StageProgram, answer: CutAnswer) -> None:
        """Add what decides how long a cut takes."""
        if answer.best is None:
            return
        question = self.question
        number = question.bucket_bytes.index(answer.best.arrangement.bucket_bytes)
        prices = [offer.prices[number] for offer in answer.best.offers]
        reduced = [0.0] * question.shape.ranks
        for stage, price in enumerate(prices):
            reduced[question.ranks[stage]] += price.reduction_seconds
        for chain in longest_chains(
            question.arrangement.schedule,
            question.shape,
            [price.seconds for price in prices],
            transfer_seconds=[self.columns.transfers[stop - 1] for stop in answer.best.cut[1:-1]],
            reduction_seconds=reduced,
        ):
            program.add_chain(chain)

    def _unit(self, columns: list[Column]) -> float:
        most = max(float(one.times.sum()) for one in columns)
        return most * self.question.shape.microbatches or 1.0
