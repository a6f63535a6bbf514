"""Finds the cut and the modes with the least memory on the fullest rank, regardless of time."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.programs.stages.cut_bounds import Columns
from autopar.planner.programs.stages.mixes import lightest_mix
from autopar.planner.programs.stages.modes import PricedCut, priced
from autopar.planner.programs.stages.offers import Offer
from autopar.planner.programs.stages.program import MemoryProgram
from autopar.planner.programs.stages.question import Cut, StageQuestion

_MOST_NODES = 2_000  # of the program
_MOST_EXACT = 8  # mixes of a stage whose memory is computed exactly


def smallest_stages(question: StageQuestion) -> PricedCut | None:
    """Return the cut with the least memory, or None if the layers cannot be cut into stages.

    If ranks have several stages, this is the lightest cut that the program finds within its limit
    of nodes; cuts with long stages are looked at only if no other is found.
    """
    if any(first > last for first, last in question.windows):
        return None
    columns = Columns(question)
    if question.shape.stages_per_rank > 1:
        return _by_program(columns)
    table = _Lightest(columns)
    count, stages = len(question.classes), question.shape.stages
    longest = min(count - stages + 1, 1 + -(-count // stages))
    while True:
        most, cut = table.least_maximum(longest)
        if longest == count - stages + 1 or table.least_of(longest + 1) >= most:
            break
        longest = min(count - stages + 1, 2 * longest)
    if not cut:
        return None
    offers = tuple(
        table.offer(stage, first, stop)[1] for stage, (first, stop) in enumerate(pairwise(cut))
    )
    return priced(question, cut, offers)


class _Lightest:
    """The least memory of each interval of layers as a stage, if every rank has one stage."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.question = columns, columns.question
        self._known: dict[object, tuple[int, Offer]] = {}

    def offer(self, stage: int, first: int, stop: int) -> tuple[int, Offer]:
        """Return the lightest way to run layers as a stage, and its rank's bytes."""
        question, content = self.question, self.question.classes[first:stop]
        rank = question.ranks[stage]
        moments = question.moments[rank]
        key = question.kinds[stage], stage == 0, moments.key, content
        if key not in self._known:
            if question.arrangement.is_one_pass:
                mixes, near = lightest_mix(question, question.kinds[stage], content), [0]
            else:
                mixes = self.columns.offers.mixes(stage, content)
                flying = np.where(mixes.again, moments.unanswered.max(), moments.forwarded.max())
                near = np.argsort(mixes.saved * flying + mixes.work, kind="stable").tolist()
            every = [
                self.columns.offers.exact(stage, content, mixes.modes(place, content))
                for place in near[:_MOST_EXACT]
            ]
            needed = [self._bytes(offer, rank) for offer in every]
            self._known[key] = min(needed), every[needed.index(min(needed))]
        return self._known[key]

    def _bytes(self, offer: Offer, rank: int) -> int:
        question, moments = self.question, self.question.moments[rank]
        loads = [offer.price.load]
        return memory_of(loads, moments, question.arrangement, question.constants).device_bytes

    def least_maximum(self, longest: int) -> tuple[float, Cut]:
        """Return the least bytes of the fullest stage, and the cut, if stages are not too long.

        No stage may have more layers than `longest`.
        """
        count, stages = len(self.question.classes), self.question.shape.stages
        best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
        for stage in range(stages):
            here: dict[int, tuple[float, int]] = {}
            for first, stop in self.question.intervals(stage, longest):
                if first in best[stage]:
                    needed = max(best[stage][first][0], self.offer(stage, first, stop)[0])
                    if needed < here.get(stop, (math.inf, 0))[0]:
                        here[stop] = needed, first
            best.append(here)
        if count not in best[stages]:
            return math.inf, ()
        cut = [count]
        for stage in range(stages, 0, -1):
            cut.append(best[stage][cut[-1]][1])
        return best[stages][count][0], tuple(reversed(cut))

    def least_of(self, length: int) -> float:
        """Return the memory of the lightest stage with this number of layers."""
        stages = range(self.question.shape.stages)
        return min(
            (
                self.offer(stage, first, stop)[0]
                for stage in stages
                for first, stop in self.question.intervals(stage, length)
                if stop - first == length
            ),
            default=math.inf,
        )


def _by_program(columns: Columns) -> PricedCut | None:
    """Return the cut that the memory program finds, for ranks with several stages.

    Longer stages are tried only if it finds none.
    """
    question = columns.question
    count, stages = len(question.classes), question.shape.stages
    longest = min(count - stages + 1, 2 + -(-count // stages))
    while True:
        every = columns.of_all(question.different_intervals(longest))
        if len({one.stage for one in every}) == stages:
            program = MemoryProgram(question, every)
            decision = program.solve(most_nodes=_MOST_NODES)
            if decision.columns:
                cut = (*(one.first for one in decision.columns), count)
                return priced(question, cut, tuple(one.offer for one in decision.columns))
        if longest == count - stages + 1:
            return None
        longest = min(count - stages + 1, 2 * longest)
