"""Finds the best recompute modes of a given cut, within each rank's memory.

A way is one offer for each stage of a rank. Ranks do not share memory, so ways are listed for each
rank on its own. A step only depends on the times of stages, so a way is dropped if another one is
at least as fast in every action. If the combinations of the ranks' remaining ways are few, all are
priced. Otherwise one rank at a time changes its way, while the step becomes shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.paths import Chains
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.stage_price import StagePrice
from autopar.planner.costs.steps.step import step_of
from autopar.planner.programs.stages.cut_bounds import Columns, with_transfer
from autopar.planner.programs.stages.offers import Offer, RankMemory
from autopar.planner.programs.stages.question import Content, Cut, StageQuestion

_MOST_WAYS = 64  # of one rank: if there are more, one way that fits is found step by step
_MOST_ACTIONS = 1 << 15  # to simulate for one cut, over all combinations
_MOST_TRIES = 4  # attempts to fill a rank's memory, because sums are slightly below exact prices
_MOST_KEPT = 8  # ways of each rank that are tried, if there are too many combinations

Way = tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedCut:
    """A cut with the best modes found, and its exact step."""

    cut: Cut
    arrangement: Arrangement  # including the bucket size
    offers: tuple[Offer, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutAnswer:
    """The result for a cut; `best` is None if no modes fit."""

    best: PricedCut | None
    compares_all: bool  # no modes were left out of the comparison


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutFilter:
    """Excludes a cut before it is priced, if chains (paths.py) show that its step is too long."""

    chains: Chains
    below_seconds: float  # of a whole step
    once_seconds: float  # the least time of a step outside of the pipeline

    def least_seconds(self, columns: Columns, cut: Cut, offers: Sequence[Offer]) -> float:
        """Return a lower bound of the step of a cut with these offers."""
        times = [
            with_transfer(offer.least_times, columns.transfers[stop - 1])
            for offer, stop in zip(offers, cut[1:], strict=True)
        ]
        return float(self.chains.lengths(np.array(times)).max()) + self.once_seconds


class CutPricer:
    """Prices the cuts of a question; the ways of a rank to run some layers are cached."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.question = columns, columns.question
        self._known: dict[tuple[int, tuple[Content, ...]], tuple[list[Way], bool]] = {}

    def price(self, cut: Cut, cut_filter: CutFilter) -> CutAnswer | None:
        """Return the best modes of a cut, or None if `cut_filter` excludes it."""
        compares_all = True
        ranks: list[list[Way]] = []
        for rank in range(self.question.shape.ranks):
            ways, is_all = self._ways(rank, cut)
            compares_all = compares_all and is_all
            if not ways:
                return CutAnswer(best=None, compares_all=compares_all)
            ranks.append(ways)
        best, is_all = _best_together(self.columns, cut, ranks, cut_filter)
        return CutAnswer(best=best, compares_all=compares_all and is_all) if best else None

    def _ways(self, rank: int, cut: Cut) -> tuple[list[Way], bool]:
        """Return the ways of a rank, and whether all other ways are worse."""
        question, stages = self.question, self.question.stages_of[rank]
        contents = tuple(question.classes[cut[stage] : cut[stage + 1]] for stage in stages)
        if (rank, contents) not in self._known:
            offers = [
                self.columns.offers.of(stage, content)
                for stage, content in zip(stages, contents, strict=True)
            ]
            ways, is_all = _ways(self.columns, rank, contents, offers)
            are_all = is_all and all(one.others_are_worse for own in offers for one in own)
            self._known[rank, contents] = ways, are_all
        return self._known[rank, contents]


def _ways(
    columns: Columns,
    rank: int,
    contents: Sequence[Content],
    offers: Sequence[Sequence[Offer]],
) -> tuple[list[Way], bool]:
    """Return the ways of a rank that fit and that no other beats, and whether these are all."""
    question = columns.question
    if len(contents) == 1:
        return [(one,) for one in offers[0]], True
    if all(one.others_are_worse for own in offers for one in own):
        if prod(map(len, offers)) <= _MOST_WAYS:
            return _unbeaten(question, rank, list(product(*offers))), True
    else:
        offers = [
            columns.offers.every(stage, content)
            for stage, content in zip(question.stages_of[rank], contents, strict=True)
        ]
    found = _filled(question, rank, offers)
    return ([found] if found else []), False


def _fits(question: StageQuestion, rank: int, way: Way) -> bool:
    return _excess_bytes(question, rank, way) <= 0


def _excess_bytes(question: StageQuestion, rank: int, way: Way) -> int:
    """Return by how much a way exceeds its rank's memory."""
    memory = memory_of(
        [one.price.load for one in way],
        question.moments[rank],
        question.arrangement,
        question.constants,
    )
    return memory.device_bytes - question.limit_bytes[rank]


def _unbeaten(question: StageQuestion, rank: int, ways: Sequence[Way]) -> list[Way]:
    """Return the ways that fit, without those that another equals or beats in every action."""
    if not ways:
        return []
    times = np.array([_amounts(way) for way in ways])
    is_beating = np.ones((len(ways), len(ways)), dtype=np.bool_)  # or equal, in each action
    for amounts in times.T:
        is_beating &= amounts[:, None] <= amounts
    kept: list[int] = []
    for place in np.lexsort(times.T[::-1]).tolist():
        if not is_beating[kept, place].any() and _fits(question, rank, ways[place]):
            kept.append(place)
    return [ways[place] for place in kept]


def _amounts(way: Way) -> list[float]:
    return [
        amount
        for offer in way
        for amount in (
            *offer.times.tolist(),
            *(price.reduction_seconds for price in offer.prices),
        )
    ]


def _filled(question: StageQuestion, rank: int, offers: Sequence[Sequence[Offer]]) -> Way | None:
    """Return a way that fits: from the lightest on, take what gains most seconds for each byte."""
    memory = RankMemory(question, rank, offers)
    limit = memory.limit_bytes
    for _ in range(_MOST_TRIES):
        way = _filled_to(limit, memory, offers)
        if not way:
            return None
        found = tuple(own[number] for own, number in zip(offers, way, strict=True))
        over = _excess_bytes(question, rank, found)
        if over <= 0:
            return found
        limit -= over
    return None


def _filled_to(
    limit_bytes: float, memory: RankMemory, offers: Sequence[Sequence[Offer]]
) -> list[int]:
    """Return the number of each stage's offer; [] if not even the lightest offers fit together."""
    seconds = [np.array([one.seconds for one in own]) for own in offers]
    saved = [np.array([one.saved_bytes for one in own]) for own in offers]
    way = [int(np.lexsort((seconds[place], own))[0]) for place, own in enumerate(saved)]
    now = memory.needed_bytes(way)
    if now > limit_bytes:
        return []
    while True:
        steps = (
            one
            for place in range(len(way))
            for one in _steps(memory, way, place, seconds, now)
            if one[3] <= limit_bytes
        )
        best = max(steps, default=None)
        if best is None:
            return way
        _, place, number, now = best
        way[place] = number


def _steps(
    memory: RankMemory,
    way: Sequence[int],
    place: int,
    seconds: Sequence[Floats],
    now_bytes: float,
) -> Iterator[tuple[float, int, int, float]]:
    """Yield changes of one stage: seconds gained per byte, stage, offer, bytes afterwards."""
    own = seconds[place]
    gain = own[way[place]] - own
    needed = memory.needed_with(way, place)
    for number in np.flatnonzero(gain > 0).tolist():
        more = max(1.0, needed[number] - now_bytes)
        yield float(gain[number] / more), place, number, float(needed[number])


def _best_together(
    columns: Columns, cut: Cut, ranks: Sequence[Sequence[Way]], cut_filter: CutFilter
) -> tuple[PricedCut | None, bool]:
    """Return the best combination of the ranks' ways, and whether all were compared.

    None if no step is below `cut_filter.below_seconds`.
    """
    question = columns.question
    actions = question.shape.stages * question.shape.microbatches
    if prod(map(len, ranks)) <= max(1, _MOST_ACTIONS // actions):
        best: PricedCut | None = None
        for chosen in product(*ranks):
            best = _better(columns, cut, chosen, cut_filter, best)
        return best, True
    together = [own[0] for own in ranks]
    best = _better(columns, cut, together, cut_filter, None)
    kept = _MOST_KEPT if actions <= _MOST_ACTIONS // _MOST_KEPT else 1
    for rank, own in enumerate(ranks if best else []):
        for way in own[1:kept]:
            other = _better(
                columns, cut, [*together[:rank], way, *together[rank + 1 :]], cut_filter, best
            )
            if other is not best:
                best, together[rank] = other, way
    return best, False


def _better(
    columns: Columns, cut: Cut, ways: Sequence[Way], cut_filter: CutFilter, best: PricedCut | None
) -> PricedCut | None:
    """Price one way per rank; return the result if its step is shorter, else `best`."""
    question = columns.question
    by_stage = _by_stage(question, ways)
    below = min(cut_filter.below_seconds, best.seconds if best else math.inf)
    if cut_filter.least_seconds(columns, cut, by_stage) >= below:
        return best
    found = priced(question, cut, by_stage)
    return found if best is None or found.seconds < best.seconds else best


def _by_stage(question: StageQuestion, ways: Sequence[Way]) -> tuple[Offer, ...]:
    found: dict[int, Offer] = {}
    for stages, way in zip(question.stages_of, ways, strict=True):
        found.update(zip(stages, way, strict=True))
    return tuple(found[stage] for stage in range(len(found)))


def priced(question: StageQuestion, cut: Cut, offers: tuple[Offer, ...]) -> PricedCut:
    """Return the step of a cut with given modes and its best bucket size."""
    tried: list[tuple[float, Arrangement]] = []
    for number, arrangement in enumerate(_arrangements(question)):
        prices = [offer.prices[number] for offer in offers]
        if not tried or _fits_all(question, arrangement, offers):
            tried.append((seconds_of(question, arrangement, prices), arrangement))
    seconds, arrangement = min(tried, key=lambda one: one[0])
    return PricedCut(cut=cut, arrangement=arrangement, offers=offers, seconds=seconds)


def _fits_all(question: StageQuestion, arrangement: Arrangement, offers: Sequence[Offer]) -> bool:
    """Whether all ranks have room for larger buckets.

    Larger ones need more memory if copies of them are sent, or if gradients are made while
    activations are freed.
    """
    if not (arrangement.compression.buffer_share or arrangement.is_one_pass):
        return True
    return all(
        memory_of(
            [offers[stage].price.load for stage in stages],
            question.moments[rank],
            arrangement,
            question.constants,
        ).device_bytes
        <= question.limit_bytes[rank]
        for rank, stages in enumerate(question.stages_of)
    )


def _arrangements(question: StageQuestion) -> Iterator[Arrangement]:
    for size in question.bucket_bytes:
        yield replace(question.arrangement, bucket_bytes=size)


def seconds_of(
    question: StageQuestion, arrangement: Arrangement, prices: Sequence[StagePrice]
) -> float:
    """Return the predicted step of priced stages."""
    return step_of(
        prices,
        arrangement,
        question.groups,
        constants=question.constants,
        tied_gradient_bytes=question.tied_gradient_bytes,
    ).seconds
