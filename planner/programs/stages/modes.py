"""Finds how the layers of a given cut run best: the modes of each stage, within each rank's memory.

Ranks do not share memory, so each has its own ways to run its stages. What a rank's stages take is
all that a step sees of them, so ways that are nowhere quicker are dropped. Of what is left, all
ways together are priced if they are few; otherwise one rank at a time changes its way, as long as
the step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from autopar.planner.costs.prediction import Arrangement
from autopar.planner.costs.schedules.paths import Floats
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.stage_price import StagePrice
from autopar.planner.costs.steps.step import step_of
from autopar.planner.programs.stages.columns import Columns
from autopar.planner.programs.stages.offers import Offer
from autopar.planner.programs.stages.question import Cut, StageQuestion
from autopar.planner.programs.stages.rank_memory import RankMemory

_MOST_WAYS = 512  # of one rank, or of all together
_MOST_TRIES = 4  # to fill a rank's memory, which sums see a little smaller than prices
_MOST_KEPT = 8  # ways of one rank, where it has many

Way = tuple[Offer, ...]  # the offers of a rank's stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedCut:
    """A cut with the best modes found for it, and the exact step."""

    cut: Cut
    arrangement: Arrangement  # with the size of buckets
    offers: tuple[Offer, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutAnswer:
    """What came of a cut: None where nothing fits; whether all its modes were compared."""

    best: PricedCut | None
    is_whole: bool


def price_cut(columns: Columns, cut: Cut) -> CutAnswer:
    """Return the best way to run a cut."""
    question = columns.question
    offers = [
        columns.offers.of(stage, question.classes[cut[stage] : cut[stage + 1]])
        for stage in range(question.shape.stages)
    ]
    is_whole = all(one.is_whole for own in offers for one in own)
    ranks: list[list[Way]] = []
    for rank, stages in enumerate(question.stages_of):
        own = [offers[stage] for stage in stages]
        ways, is_all = _ways(columns, rank, stages, cut, own)
        is_whole = is_whole and is_all
        if not ways:
            return CutAnswer(best=None, is_whole=is_whole)
        ranks.append(ways)
    best, is_all = _best_together(question, cut, ranks)
    return CutAnswer(best=best, is_whole=is_whole and is_all)


def _ways(
    columns: Columns,
    rank: int,
    stages: Sequence[int],
    cut: Cut,
    offers: Sequence[Sequence[Offer]],
) -> tuple[list[Way], bool]:
    """Return the ways of a rank that fit and that no other betters, and whether these are all."""
    question = columns.question
    if len(stages) == 1:
        return [(one,) for one in offers[0]], True
    if all(one.is_whole for own in offers for one in own):
        if prod(map(len, offers)) <= _MOST_WAYS:
            fitting = [way for way in product(*offers) if _fits(question, rank, way)]
            return _unbeaten(fitting), True
    else:
        contents = [question.classes[cut[stage] : cut[stage + 1]] for stage in stages]
        offers = [
            columns.offers.every(stage, content)
            for stage, content in zip(stages, contents, strict=True)
        ]
    found = _filled(question, rank, offers)
    return ([found] if found else []), False


def _fits(question: StageQuestion, rank: int, way: Way) -> bool:
    return _excess_bytes(question, rank, way) <= 0


def _excess_bytes(question: StageQuestion, rank: int, way: Way) -> int:
    """Return by how much a way exceeds what its rank may use."""
    memory = memory_of(
        [one.price.load for one in way],
        question.moments[rank],
        question.arrangement,
        question.constants,
    )
    return memory.device_bytes - question.limit_bytes[rank]


def _unbeaten(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that no other is at most as long as, stage by stage and action by action."""
    if len(ways) < 2:
        return list(ways)
    times = np.array([_amounts(way) for way in ways])
    order = np.lexsort(times.T[::-1])
    kept: list[int] = []
    for place in order.tolist():
        if not any((times[other] <= times[place]).all() for other in kept):
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
    """Return one way that fits: the lightest, made faster where that takes least memory."""
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
    """Return the place of each stage's offer, none where not even the lightest fit."""
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
    """Yield what one stage may change to: seconds gained for a byte, stage, offer, bytes then."""
    own = seconds[place]
    gain = own[way[place]] - own
    needed = memory.needed_with(way, place)
    for number in np.flatnonzero(gain > 0).tolist():
        more = max(1.0, needed[number] - now_bytes)
        yield float(gain[number] / more), place, number, float(needed[number])


def _best_together(
    question: StageQuestion, cut: Cut, ranks: Sequence[Sequence[Way]]
) -> tuple[PricedCut, bool]:
    """Return the best of all ways together, and whether all were compared."""
    if prod(map(len, ranks)) <= _MOST_WAYS:
        every = (_of_ways(question, cut, chosen) for chosen in product(*ranks))
        return min(every, key=lambda one: one.seconds), True
    chosen = [own[0] for own in ranks]
    best = _of_ways(question, cut, chosen)
    for rank, own in enumerate(ranks):
        for way in own[1:_MOST_KEPT]:
            other = _of_ways(question, cut, [*chosen[:rank], way, *chosen[rank + 1 :]])
            if other.seconds < best.seconds:
                best, chosen[rank] = other, way
    return best, False


def _of_ways(question: StageQuestion, cut: Cut, ways: Sequence[Way]) -> PricedCut:
    """Return the step of a way of each rank."""
    by_stage: dict[int, Offer] = {}
    for stages, way in zip(question.stages_of, ways, strict=True):
        by_stage.update(zip(stages, way, strict=True))
    return priced(question, cut, tuple(by_stage[stage] for stage in range(len(by_stage))))


def priced(question: StageQuestion, cut: Cut, offers: tuple[Offer, ...]) -> PricedCut:
    """Return the step of a cut with given modes, with the buckets that make it shortest."""
    tried: list[tuple[float, Arrangement]] = []
    for number, arrangement in enumerate(_arrangements(question)):
        prices = [offer.prices[number] for offer in offers]
        if not tried or _fits_all(question, arrangement, offers):
            tried.append((seconds_of(question, arrangement, prices), arrangement))
    seconds, arrangement = min(tried, key=lambda one: one[0])
    return PricedCut(cut=cut, arrangement=arrangement, offers=offers, seconds=seconds)


def _fits_all(question: StageQuestion, arrangement: Arrangement, offers: Sequence[Offer]) -> bool:
    """Whether all ranks have room for larger buckets; only copies that are sent take any."""
    if not arrangement.compressed_gradients:
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
    """Return the step of priced stages: what is predicted of them."""
    return step_of(
        prices,
        arrangement,
        question.groups,
        constants=question.constants,
        tied_gradient_bytes=question.tied_gradient_bytes,
    ).seconds
