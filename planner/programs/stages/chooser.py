"""Prices cuts of one question, keeps the best, and lets the program choose others.

The program's cut is the one of the least bound among those not priced yet. It is priced and left
out, and what decides how long it takes becomes a row. So the program's bound rises until it reaches
the best cut known: no better one exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.planner.costs.schedules.paths import Chain, Chains, longest_chains
from autopar.planner.costs.steps.rank_groups import norm_seconds
from autopar.planner.costs.steps.step import tied_seconds
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stages.borders import moved_cuts
from autopar.planner.programs.stages.columns import Column, Columns
from autopar.planner.programs.stages.divisible import Divisible
from autopar.planner.programs.stages.modes import CutAnswer, Floor, PricedCut, Pricer
from autopar.planner.programs.stages.program import StageProgram
from autopar.planner.programs.stages.question import Cut, StageQuestion

_BETTER = 1.0 - 1e-9  # of the best cut: what is not below this is no better
_LEAST_SECONDS = 0.1  # for one program
_NEAR = 1.1  # times the best: moves of one layer do not make a longer step the best one


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is done for one arrangement."""

    moves: int  # of borders, one layer each, while ranks have several stages
    cuts: int  # priced after the program has chosen them
    program_seconds: float  # for all programs of it
    gap: float  # as a share: bound and best need not meet closer than that
    most_columns: int  # of a program; a larger one is not asked


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnswer:
    """The best cut found below the cutoff, if any, and what no cut beats.

    An infinite bound: nothing fits. `is_final`: more effort finds nothing else.
    """

    best: PricedCut | None
    bound_seconds: float
    report: SolverReport
    is_final: bool


class Chooser:
    """One question on its way to an answer; asked again, it goes on from what it has found."""

    def __init__(self, question: StageQuestion, effort: Effort, chains: Chains) -> None:
        self.question, self.effort, self.cutoff = question, effort, math.inf
        self.chains = chains
        self.columns = Columns(question)
        self.best: PricedCut | None = None
        self.report = NOTHING_SOLVED
        self.once = (
            tied_seconds(question.groups, question.arrangement, question.tied_gradient_bytes)
            + norm_seconds(question.groups, question.arrangement)
            + question.constants.step_seconds
        )
        self._pricer = Pricer(self.columns)
        self._priced: dict[Cut, CutAnswer] = {}

    def ask(self, cutoff_seconds: float, effort: Effort) -> None:
        """Look from here on for what is below a cutoff, with another effort."""
        self.cutoff, self.effort, self.report = cutoff_seconds, effort, NOTHING_SOLVED

    @cached_property
    def divisible(self) -> Divisible:
        """The program of divisible layers."""
        return Divisible(self.question, self.columns.transfers, self.chains)

    @property
    def top(self) -> float:
        """What no cut beats, where all those below the aim are ruled out."""
        return min(self.cutoff, self.best.seconds if self.best else math.inf)

    @property
    def aim(self) -> float:
        """What a cut has to be below."""
        return self.top * _BETTER

    @property
    def enough(self) -> float:
        """The bound that is close enough to what is known."""
        return self.aim - self.effort.gap * self.top if self.top < math.inf else math.inf

    def answer(self, bound_seconds: float, *, is_final: bool = False) -> StageAnswer:
        """Return what came of the question."""
        return StageAnswer(
            best=self.best,
            bound_seconds=bound_seconds,
            report=self.report,
            is_final=is_final or bound_seconds >= self.aim,
        )

    def price(self, cut: Cut, *, below_seconds: float = math.inf) -> CutAnswer:
        """Return what comes of a cut, and keep it if it is the best.

        What a chain shows to take no less than some seconds may stay without a price.
        """
        if cut not in self._priced:
            floor = Floor(chains=self.chains, below_seconds=below_seconds, once_seconds=self.once)
            answer = self._pricer.price(cut, floor)
            if answer is None:
                return CutAnswer(best=None, is_whole=False)
            self._priced[cut] = answer
            best = self.best.seconds if self.best else math.inf
            if answer.best and answer.best.seconds < best:
                self.best = answer.best
        return self._priced[cut]

    def improve(self, cut: Cut, *, most_moves: int) -> None:
        """Price a cut, then move one border at a time while that makes the step shorter.

        It ends where the moves that are left, each worth as much as the last one, come to no better
        cut than is known.
        """
        here = self.price(cut, below_seconds=_NEAR * self.top).best if cut else None
        gain = math.inf
        for left in range(most_moves, 0, -1):
            if here is None or here.seconds > min(_NEAR * self.top, self.top + left * gain):
                return
            self.chains.add(self._deciding(here))
            before = here
            for other in moved_cuts(self.question, before.cut):
                moved = self.price(other, below_seconds=here.seconds).best
                if moved and moved.seconds < here.seconds:
                    here = moved
            gain = before.seconds - here.seconds
            if not gain:
                return

    def by_program(self, columns: Sequence[Column]) -> float:
        """Return the bound of all cuts that are made of some columns, zero if these are many."""
        question = self.question
        if len(columns) > self.effort.most_columns:
            return 0.0
        if len({one.stage for one in columns}) < question.shape.stages:
            return self.top
        unit = self.aim if self.aim < math.inf else self._unit(columns)
        program = StageProgram(question, columns, unit_seconds=unit)
        for cut, answer in self._priced.items():
            if answer.best:
                self.chains.add(self._deciding(answer.best))
            if answer.is_whole:
                program.exclude(cut)
        for chain in self.chains:
            program.add_chain(chain)
        bound, doubtful = 0.0, math.inf  # the least bound of cuts whose modes were not all compared
        left_seconds = self.effort.program_seconds
        for _ in range(self.effort.cuts):
            if self.aim < math.inf:
                program.below(self.aim - self.once)
            decision = program.solve(
                time_limit_seconds=max(left_seconds, _LEAST_SECONDS), gap=self.effort.gap
            )
            self.report += decision.report
            left_seconds -= decision.report.seconds
            bound = max(bound, decision.bound_seconds + self.once)
            if bound >= self.enough or not decision.columns or left_seconds < 0:
                return min(doubtful, self.top if bound >= self.aim else bound)
            cut = (*(one.first for one in decision.columns), len(question.classes))
            is_known = cut in self._priced
            answer = self.price(cut)
            for chain in self._deciding(answer.best) if answer.best else ():
                program.add_chain(chain)
            if answer.is_whole or is_known:
                doubtful = doubtful if answer.is_whole else min(doubtful, bound)
                program.exclude(cut)
        return min(doubtful, bound, self.top)

    def _deciding(self, priced: PricedCut) -> tuple[Chain, ...]:
        """Return what decides how long a cut takes."""
        question = self.question
        number = question.bucket_bytes.index(priced.arrangement.bucket_bytes)
        prices = [offer.prices[number] for offer in priced.offers]
        reduced = [0.0] * question.shape.ranks
        for stage, price in enumerate(prices):
            reduced[question.ranks[stage]] += price.reduction_seconds
        return longest_chains(
            question.arrangement.schedule,
            question.shape,
            [price.seconds for price in prices],
            transfer_seconds=[self.columns.transfers[stop - 1] for stop in priced.cut[1:-1]],
            reduction_seconds=reduced,
        )

    def _unit(self, columns: Sequence[Column]) -> float:
        most = max(float(one.times.sum()) for one in columns)
        return most * self.question.shape.microbatches or 1.0
