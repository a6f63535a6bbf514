"""Chooses the stages of an arrangement: their layers and recompute modes, with a lower bound.

    1. bound       GPipe, 1F1B: by shortest paths (cut_bounds.py), which also exclude many stages;
                   other schedules: by a program with divisible layers (divisible.py)
    2. first cut   the cut found with the bound is priced exactly; its borders are moved while that
                   shortens the step
    3. program     finds, again and again, the unpriced cut with the least bound (program.py)

Each cut that the program finds is priced and excluded, and its critical path becomes a constraint.
This raises the program's bound, until it reaches the best known cut: that cut is optimal. If the
effort ends earlier, the bound tells by how much another cut may be better at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

import numpy as np

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.paths import Chain, Chains, longest_chains
from autopar.planner.costs.steps.stage_load import norm_seconds
from autopar.planner.costs.steps.step import tied_seconds
from autopar.planner.programs.solver import NOTHING_SOLVED, SolverReport
from autopar.planner.programs.stages.cut_bounds import Column, Columns, CutBounds, cut_bounds
from autopar.planner.programs.stages.divisible import DividedLayers, Divisible
from autopar.planner.programs.stages.modes import CutAnswer, CutFilter, CutPricer, PricedCut
from autopar.planner.programs.stages.program import StageProgram
from autopar.planner.programs.stages.question import (
    Cut,
    StageQuestion,
    even_cut,
    least_seconds,
    moved_cuts,
    nearest_cut,
)

_BETTER = 1.0 - 1e-9  # times the best cut's step: a step has to be shorter to be better
_LEAST_NODES = 20  # of one program
NEAR = 1.1  # times the best step: slower cuts are not improved, because moves gain too little


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much may be tried for one arrangement."""

    simulations: int  # of the schedule, to find chains for the program of divisible layers
    starts: int  # cuts found with divisible layers, whose borders are then moved
    moves: int  # moves of borders by one layer, if ranks have several stages
    cuts: int  # cuts that the program finds and that are priced
    nodes: int  # of all stage programs of the arrangement together
    gap: float  # the search ends if bound and best cut differ by at most this share
    most_columns: int  # of a program; a larger one is not solved
    is_last: bool = False  # only then is divisible.py also solved in whole numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageAnswer:
    """The best cut below the cutoff, if any, and a lower bound of all cuts.

    The bound is infinite if no cut fits. `is_final`: more effort would change nothing.
    """

    best: PricedCut | None
    bound_seconds: float
    report: SolverReport
    is_final: bool


class Chooser:
    """Answers a stage question; asked again, it goes on from what it has found so far."""

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
        self._pricer = CutPricer(self.columns)
        self._priced: dict[Cut, CutAnswer] = {}
        self._divisible: dict[int, Divisible] = {}  # by the most layers of a stage

    def ask(self, cutoff_seconds: float, effort: Effort) -> None:
        """From now on, look only for steps shorter than a cutoff, with this effort."""
        self.cutoff, self.effort, self.report = cutoff_seconds, effort, NOTHING_SOLVED

    def divisible(self) -> Divisible:
        """Return the program of divisible layers for cuts below the aim."""
        longest = _longest_that_matters(self, 1)
        if longest not in self._divisible:
            self._divisible[longest] = Divisible(
                self.question, self.columns.transfers, self.chains, longest=longest
            )
        return self._divisible[longest]

    def last_divisible(self) -> Divisible:
        """Return the program of divisible layers, and forget it: its next use spoils it."""
        program, self._divisible = self.divisible(), {}
        return program

    @property
    def top(self) -> float:
        """The cutoff, or the shortest step so far if that is less.

        It is a lower bound of all cuts once the search has shown that no cut is shorter.
        """
        return min(self.cutoff, self.best.seconds if self.best else math.inf)

    @property
    def aim(self) -> float:
        """The seconds that a step must be below to be better."""
        return self.top * _BETTER

    @property
    def enough(self) -> float:
        """The bound that is close enough to the best known cut."""
        return self.aim - self.effort.gap * self.top if self.top < math.inf else math.inf

    def answer(self, bound_seconds: float, *, is_final: bool = False) -> StageAnswer:
        """Return the result so far."""
        return StageAnswer(
            best=self.best,
            bound_seconds=bound_seconds,
            report=self.report,
            is_final=is_final or bound_seconds >= self.aim,
        )

    def price(self, cut: Cut, *, below_seconds: float = math.inf) -> CutAnswer:
        """Price a cut, and keep it if it is the best.

        A cut stays without a price if chains prove that its step is not below `below_seconds`.
        """
        if cut not in self._priced:
            cut_filter = CutFilter(
                chains=self.chains, below_seconds=below_seconds, once_seconds=self.once
            )
            answer = self._pricer.price(cut, cut_filter)
            if answer is None:
                return CutAnswer(best=None, compares_all=False)
            self._priced[cut] = answer
            if answer.best and (not self.best or answer.best.seconds < self.best.seconds):
                self.best = answer.best
        return self._priced[cut]

    def improve(self, cut: Cut, *, most_moves: int, most_apart: int = 1) -> None:
        """Price a cut, then move one layer at a time while the step becomes shorter.

        It stops when the moves left, each with the last one's gain, would not reach the best cut.
        """
        here = self.price(cut, below_seconds=NEAR * self.top).best if cut else None
        gain = math.inf
        for left in range(most_moves, 0, -1):
            if here is None or here.seconds > min(NEAR * self.top, self.top + left * gain):
                return
            self.chains.add(self._deciding(here))
            before = here
            for other in moved_cuts(self.question, before.cut, most_apart=most_apart):
                moved = self.price(other, below_seconds=here.seconds).best
                if moved and moved.seconds < here.seconds:
                    here = moved
            gain = before.seconds - here.seconds
            if not gain:
                return

    def by_program(self, columns: Sequence[Column]) -> float:
        """Return a lower bound of all cuts made of these columns; zero if there are too many."""
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
            if answer.compares_all:
                program.exclude(cut)
        for chain in self.chains:
            program.add_chain(chain)
        # doubtful: a bound of the excluded cuts of which not all modes were compared
        bound, doubtful = 0.0, math.inf
        left = self.effort.nodes
        for _ in range(self.effort.cuts):
            if self.aim < math.inf:
                program.below(self.aim - self.once)
            decision = program.solve(most_nodes=max(left, _LEAST_NODES), gap=self.effort.gap)
            self.report += decision.report
            left -= decision.report.nodes
            bound = max(bound, decision.bound_seconds + self.once)
            if bound >= self.enough or not decision.columns or left < 0:
                return min(doubtful, self.top if bound >= self.aim else bound)
            cut = (*(one.first for one in decision.columns), len(question.classes))
            is_known = cut in self._priced
            answer = self.price(cut)
            for chain in self._deciding(answer.best) if answer.best else ():
                program.add_chain(chain)
            if answer.compares_all or is_known:
                doubtful = doubtful if answer.compares_all else min(doubtful, bound)
                program.exclude(cut)
        return min(doubtful, bound, self.top)

    def _deciding(self, priced: PricedCut) -> tuple[Chain, ...]:
        """Return the longest chains of a priced cut: its critical paths."""
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


QUICK = Effort(simulations=12, starts=0, moves=0, cuts=0, nodes=400, gap=1.0, most_columns=0)
THOROUGH = replace(QUICK, starts=2, moves=8, cuts=4, gap=5e-3, most_columns=1_000)
EXACT = replace(THOROUGH, simulations=120, starts=1, cuts=60, nodes=1_000, gap=1e-7, is_last=True)

_ASKED = 0.01  # the last effort looks only for cuts that are faster than the best by this share
_ASKED_OF_MANY = 0.05  # the same, if there are more than `_MOST_STAGES`
_MOST_STAGES = 16  # with more stages, a program of whole numbers takes too long
_MOST_INTERVALS = 100  # if ranks have several stages: with more, the stage program takes too long


def answered(chooser: Chooser) -> StageAnswer:
    """Return the answer of a chooser, by the method that suits its schedule."""
    question = chooser.question
    if any(first > last for first, last in question.windows):
        return chooser.answer(math.inf)
    if question.shape.stages == 1:
        return _whole(chooser)
    is_closed = question.arrangement.schedule.has_closed_form
    return _along_paths(chooser) if is_closed else _of_parts(chooser)


def _whole(chooser: Chooser) -> StageAnswer:
    """Return the best way to run all layers as one stage."""
    answer = chooser.price((0, len(chooser.question.classes)))
    if answer.best is None:
        return chooser.answer(math.inf)
    if answer.compares_all:
        return chooser.answer(answer.best.seconds)
    every, exact = chooser.question.shape.microbatches, answer.best.offers[0]
    others = answer.best.seconds - every * float(exact.times[:2].sum())
    others -= max(one.reduction_seconds for one in exact.prices)
    return chooser.answer(
        min(
            every * float(one.least_times[:2].sum()) + one.least_reduction_seconds + others
            for one in chooser.columns.offers.of(0, chooser.question.classes)
        )
    )


def _of_parts(chooser: Chooser) -> StageAnswer:
    """Return the best cut if a rank may have several stages, which share its memory."""
    question, effort = chooser.question, chooser.effort
    divided = _divided(chooser)
    bound = divided.bound_seconds + chooser.once
    if bound == math.inf or bound >= chooser.aim:
        return chooser.answer(min(bound, chooser.top))
    only_proves = effort.is_last and is_wide(question.arrangement)
    if not only_proves:
        chooser.improve(even_cut(question), most_moves=effort.moves)
    for _ in range(0 if only_proves else effort.starts):
        if divided.lengths:
            cut = nearest_cut(question, [*accumulate(divided.lengths)][:-1])
            chooser.improve(cut, most_moves=effort.moves)
        divided = _divided(chooser)  # the chains of these cuts are now known
        bound = max(bound, divided.bound_seconds + chooser.once)
    if not effort.is_last or bound >= chooser.aim:
        return chooser.answer(min(bound, chooser.top))
    if chooser.best and not only_proves:
        chooser.improve(chooser.best.cut, most_moves=effort.moves, most_apart=_MOST_STAGES)
    longest = _longest_that_matters(chooser, 1)
    if longest * question.shape.stages <= _MOST_INTERVALS:
        intervals = list(islice(question.different_intervals(longest), _MOST_INTERVALS + 1))
        if len(intervals) <= _MOST_INTERVALS:
            bound = max(bound, chooser.by_program(chooser.columns.of_all(intervals)))
    return chooser.answer(min(max(bound, _closer(chooser, bound)), chooser.top))


def is_wide(arrangement: Arrangement) -> bool:
    """Whether an arrangement has so many stages that the last effort only computes bounds."""
    return arrangement.pipeline * arrangement.stages_per_rank > _MOST_STAGES


def _closer(chooser: Chooser, bound_seconds: float) -> float:
    """Return a lower bound of all cuts that is closer to the best one.

    It limits stages to as many layers as faster cuts have, or ranks to whole numbers of layers.
    """
    are_many = is_wide(chooser.question.arrangement)
    asked = (1.0 - (_ASKED_OF_MANY if are_many else _ASKED)) * chooser.top - chooser.once
    if bound_seconds >= asked + chooser.once:
        return bound_seconds
    if are_many:
        return chooser.last_divisible().with_short_stages(below_seconds=asked) + chooser.once
    divided = chooser.divisible().solve_whole(below_seconds=asked)
    if divided.lengths:
        cut = nearest_cut(chooser.question, [*accumulate(divided.lengths)][:-1])
        chooser.improve(cut, most_moves=chooser.effort.moves)
    return divided.bound_seconds + chooser.once


def _divided(chooser: Chooser) -> DividedLayers:
    """Return the lower bound with divisible layers."""
    return chooser.divisible().solve(
        enough_seconds=chooser.aim - chooser.once,
        most_simulated=chooser.effort.simulations,
        hasty=not chooser.effort.moves,
    )


def _along_paths(chooser: Chooser) -> StageAnswer:
    """Return the best cut if each rank has one stage, with the bound of shortest paths."""
    question = chooser.question
    count, stages = len(question.classes), question.shape.stages
    if chooser.aim < math.inf:  # quicker than pricing all intervals
        divided = _divided(chooser)
        if divided.bound_seconds + chooser.once >= chooser.aim:
            return chooser.answer(min(divided.bound_seconds + chooser.once, chooser.top))
    longest = min(count - stages + 1, 1 + -(-4 * count // (3 * stages)))
    while True:
        # no cut has more layers before or behind a stage than the other stages can have
        columns = chooser.columns.of_all(
            (stage, first, stop)
            for stage, first, stop in question.different_intervals(longest)
            if first <= stage * longest and count - stop <= (stages - 1 - stage) * longest
        )
        bounds = _whole_step_bounds(chooser, columns) if columns else None
        if bounds is not None and bounds.cut:
            chooser.improve(bounds.cut, most_moves=len(bounds.cut))
        needed = _longest_that_matters(chooser, longest)
        if needed <= longest:
            break
        longest = needed if chooser.aim < math.inf else min(needed, 2 * longest)
    if bounds is None or bounds.seconds == math.inf:  # longer stages may fit, but take too long
        return chooser.answer(chooser.top if longest < count - stages + 1 else math.inf)
    if bounds.seconds >= chooser.aim:
        return chooser.answer(chooser.top)
    if not chooser.effort.most_columns:
        return chooser.answer(bounds.seconds)
    is_open = (bounds.of_columns < chooser.aim).tolist()
    columns = [one for one, own in zip(columns, is_open, strict=True) if own]
    return chooser.answer(max(bounds.seconds, chooser.by_program(columns)))


def _whole_step_bounds(chooser: Chooser, columns: list[Column]) -> CutBounds:
    """Return bounds of whole steps: those of the pipeline, plus reductions, optimizer, rest."""
    question = chooser.question
    bounds = cut_bounds(question, columns, chooser.columns.transfers)
    stage = np.array([one.stage for one in columns])
    updating = np.array([one.offer.optimizer_seconds for one in columns])
    reducing = np.array([one.offer.least_reduction_seconds for one in columns])
    stages = range(question.shape.stages)
    least = max(float(updating[stage == p].min(initial=math.inf)) for p in stages)
    first = float(reducing[stage == 0].min(initial=math.inf))
    behind = np.where(stage == 0, reducing, first)
    return CutBounds(
        seconds=bounds.seconds + first + least + chooser.once,
        of_columns=bounds.of_columns + behind + np.maximum(updating, least) + chooser.once,
        cut=bounds.cut,
    )


def _longest_that_matters(chooser: Chooser, longest: int) -> int:
    """Return the most layers of a stage in any cut below the aim.

    A rank with a larger stage, and with at least one layer in each of its other stages, would be
    busy for too long.
    """
    question = chooser.question
    most = len(question.classes) - question.shape.stages + 1
    if chooser.aim == math.inf:
        return most
    least = least_seconds(question)
    sums = np.concatenate([[0.0], np.cumsum(least)])
    others = (question.shape.stages_per_rank - 1) * float(least.min())
    room = (chooser.aim - chooser.once) / question.shape.microbatches - others
    for length in range(longest, most):
        if float((sums[length + 1 :] - sums[: -length - 1]).min()) >= room:
            return length
    return most
