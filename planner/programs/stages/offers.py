"""Lists the offers for stages (mixes of layers with their prices), and computes ranks' memory.

An offer is a possible stage: its layers' modes, seconds and bytes. The only stage of a rank has all
of its memory, so only mixes that fit are offered; if the stage fits without recomputation, only
that is offered. Several stages of a rank share its memory: then mixes are offered that no other
beats (of many, the hull's corners), and the program decides which fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.costs.schedules.paths import times_of
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import SCHEDULES, Moments
from autopar.planner.costs.steps.memory import memory_of, most_tensor_bytes, work_bytes
from autopar.planner.costs.steps.stage_price import StagePrice, stage_price
from autopar.planner.costs.steps.state import lasting_bytes, state_bytes
from autopar.planner.programs.stages.mixes import Mixes, fitting_mixes, hull, mixes_of
from autopar.planner.programs.stages.question import Content, StageQuestion

_MOST_PRICED = 12  # mixes of the same layers on one stage
_MOST_PRICED_ALONE = 128  # such mixes if the pipeline has only one stage
_MOST_BETWEEN = 48  # mixes from which one is taken to fill a rank's memory
_ROUNDING = 1e-9
_ENDLESS_SECONDS = 1e3  # a backward long enough to hide every reduction but the last


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots, because of a cached property
class Offer:
    """Some layers as a stage, in given modes.

    `times` are the seconds of each kind of action, without the transfer. `least_times` and
    `least_reduction_seconds` are lower bounds for this offer, and for slower mixes of these layers
    that are not offered. The exact price is computed on demand.
    """

    modes: tuple[Recompute, ...]
    times: Floats
    least_times: Floats
    least_reduction_seconds: float
    first_gather_seconds: float
    optimizer_seconds: float
    state_bytes: float
    saved_bytes: float
    deferred_bytes: float
    work_bytes: float  # the largest need of a layer while it runs
    splits_backward: bool
    exact_prices: Callable[[], tuple[StagePrice, ...]]  # computes the exact price
    others_are_worse: bool = True  # whether every mix of these layers that is not offered is worse

    @cached_property
    def prices(self) -> tuple[StagePrice, ...]:
        """The exact price for each bucket size."""
        return self.exact_prices()

    @property
    def price(self) -> StagePrice:
        """The price with the first bucket size; others differ only in the reduction."""
        return self.prices[0]

    @property
    def seconds(self) -> float:
        """The least seconds of one microbatch, forward and backward."""
        return float(self.least_times[0] + max(self.least_times[1], self.least_times[2:4].sum()))

    def bytes_over_time(self, moments: Moments, place: int) -> Floats:
        """Return this stage's bytes at each moment of its rank, without `work_bytes`.

        `place` is the stage's position among the stages of the rank.
        """
        if not self.splits_backward:
            return self.state_bytes + self.saved_bytes * moments.unanswered[:, place].astype(float)
        held = self.saved_bytes * moments.forwarded[:, place].astype(float)
        return self.state_bytes + held + self.deferred_bytes * moments.halfway[:, place]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unhidden:
    """The least seconds that data parallelism adds to a backward: while it runs, and after it."""

    wait_seconds: float
    reduction_seconds: float


class Offers:
    """The offers of a question, priced on demand."""

    def __init__(self, question: StageQuestion) -> None:
        self.question = question
        self._known: dict[object, tuple[Offer, ...]] = {}
        self._mixes: dict[tuple[int, bool, Content], Mixes] = {}
        self._buckets = [
            replace(question.arrangement, bucket_bytes=size) for size in question.bucket_bytes
        ]

    def of(self, stage: int, content: Content) -> tuple[Offer, ...]:
        """Return the offers of some layers on a stage, fastest first; empty if none fits."""
        question = self.question
        rank, key = question.ranks[stage], self._key(stage, content)
        if question.shape.stages_per_rank == 1:
            key = *key, question.moments[rank].key, question.limit_bytes[rank]
        if key not in self._known:
            made = self._shared if question.shape.stages_per_rank > 1 else self._fitting
            self._known[key] = tuple(made(stage, content))
        return self._known[key]

    def _key(self, stage: int, content: Content) -> tuple[object, ...]:
        """Return what the prices of some layers on a stage depend on."""
        question = self.question
        return question.kinds[stage], stage == 0, question.waits_for_host(stage), content

    def _fitting(self, stage: int, content: Content) -> Iterator[Offer]:
        """Yield the offers for a rank's only stage that fit, until no later one can be better.

        A later offer has a longer backward, beside which more of the reductions run. So offers are
        tried until one has the least possible reductions after its backward.
        """
        mixes = self._near(stage, content)
        if not len(mixes):
            return
        plain = self._offer(stage, content, mixes, 0)
        if not mixes.again[0] and self._fits(stage, plain):
            yield plain
            return
        unhidden = self._unhidden(stage, content)
        most = _MOST_PRICED if self.question.shape.stages > 1 else _MOST_PRICED_ALONE
        made: list[Offer] = []
        best_backward = float("inf")
        for place in self._likely(stage, mixes, plain):
            least = self._least_backward(plain, mixes, place, unhidden)
            if least >= best_backward or len(made) == most:
                break
            offer = self._offer(stage, content, mixes, place)
            if self._fits(stage, offer):
                if not made:
                    first = least
                made.append(offer)
                if offer.least_reduction_seconds <= unhidden.reduction_seconds * (1.0 + _ROUNDING):
                    best_backward = min(best_backward, float(offer.times[1]))
        if len(made) == most:
            times = made[0].times.copy()
            times[1] = min(times[1], first)
            times[2] = min(times[2], first)
            made[0] = replace(
                made[0],
                least_times=times,
                least_reduction_seconds=unhidden.reduction_seconds,
                others_are_worse=False,
            )
        yield from made

    def _near(self, stage: int, content: Content) -> Mixes:
        """Return the mixes of a rank's only stage.

        If a step has only one backward, these are only the mixes that fit.
        """
        question, rank = self.question, self.question.ranks[stage]
        if not question.arrangement.is_one_pass:
            return self.mixes(stage, content)
        room = most_tensor_bytes(
            question.limit_bytes[rank], question.arrangement, question.constants
        )
        load = self._plain(stage, content).price.load
        return fitting_mixes(
            question,
            question.kinds[stage],
            content,
            room - lasting_bytes(load, question.arrangement),
        )

    def _likely(self, stage: int, mixes: Mixes, plain: Offer) -> list[int]:
        """Return the indices of the mixes that fit by their approximate sums."""
        if self.question.arrangement.is_one_pass:
            return list(range(len(mixes)))
        rank = self.question.ranks[stage]
        moments = self.question.moments[rank]
        flying = np.where(mixes.again, moments.unanswered.max(), moments.forwarded.max())
        needed = plain.state_bytes + mixes.saved * flying + mixes.work
        return np.flatnonzero(needed <= self.question.limit_bytes[rank]).tolist()

    def _shared(self, stage: int, content: Content) -> Iterator[Offer]:
        """Yield offers for one of several stages of a rank; of many mixes, the hull's corners."""
        mixes = self.mixes(stage, content)
        others_are_worse = len(mixes) <= _MOST_PRICED
        if not others_are_worse:
            mixes = mixes.taken(np.array(hull(mixes.seconds.tolist(), mixes.saved.tolist())))
        yield from self._summed(stage, content, mixes, others_are_worse=others_are_worse)

    def every(self, stage: int, content: Content) -> tuple[Offer, ...]:
        """Return offers spread evenly over all mixes of the layers, to fill a rank's memory."""
        key = "every", *self._key(stage, content)
        if key not in self._known:
            mixes = self.mixes(stage, content)
            step = -(-len(mixes) // _MOST_BETWEEN)
            places = np.array(sorted({*range(0, len(mixes), step), len(mixes) - 1}))
            self._known[key] = tuple(
                self._summed(stage, content, mixes.taken(places), others_are_worse=False)
            )
        return self._known[key]

    def _summed(
        self, stage: int, content: Content, mixes: Mixes, *, others_are_worse: bool
    ) -> Iterator[Offer]:
        """Yield offers with approximate times; exact prices are computed on demand."""
        plain = self._plain(stage, content)
        own = plain.price.load
        empty = self.question.constants.action_seconds  # of an action without work
        for place in range(len(mixes)):
            modes = mixes.modes(place, content)
            times = plain.times.copy()
            times[1] += mixes.seconds[place] - own.backward_seconds
            if mixes.again[place]:
                times[2] = times[1]
                times[3] = empty if self.splits(stage) else 0.0
            yield replace(
                plain,
                modes=modes,
                times=times,
                least_times=times,
                saved_bytes=float(mixes.saved[place]),
                deferred_bytes=0.0 if mixes.again[place] else plain.deferred_bytes,
                work_bytes=float(mixes.work[place]),
                splits_backward=not mixes.again[place],
                exact_prices=partial(self._prices_of, stage, content, modes),
                others_are_worse=others_are_worse,
            )

    def splits(self, stage: int) -> bool:
        """Whether the schedule splits a stage's backward."""
        return stage > 0 and SCHEDULES[self.question.arrangement.schedule].splits_backward

    def _plain(self, stage: int, content: Content) -> Offer:
        """Return the offer without recomputation, with the least reductions of any mix."""
        key = "plain", *self._key(stage, content)
        if key not in self._known:
            plain = self.exact(stage, content, (Recompute.NONE,) * len(content))
            least = self._unhidden(stage, content).reduction_seconds
            self._known[key] = (replace(plain, least_reduction_seconds=least),)
        return self._known[key][0]

    def mixes(self, stage: int, content: Content) -> Mixes:
        """Return the mixes of some layers on a stage."""
        question = self.question
        waits, kind = question.waits_for_host(stage), question.kinds[stage]
        if (kind, waits, content) not in self._mixes:
            found = mixes_of(question, kind, content, waits_for_host=waits)
            self._mixes[kind, waits, content] = found
        return self._mixes[kind, waits, content]

    def exact(self, stage: int, content: Content, modes: Sequence[Recompute]) -> Offer:
        """Return a priced offer with given modes, whether or not it fits."""
        prices = self._prices_of(stage, content, modes)
        return self._priced(tuple(modes), prices)

    def _offer(self, stage: int, content: Content, mixes: Mixes, place: int) -> Offer:
        return self.exact(stage, content, mixes.modes(place, content))

    def _prices_of(
        self, stage: int, content: Content, modes: Sequence[Recompute]
    ) -> tuple[StagePrice, ...]:
        kind = self.question.kinds[stage]
        pairs = zip(content, modes, strict=True)
        return self._prices(stage, [self.question.layer(kind, one)[mode] for one, mode in pairs])

    def _prices(self, stage: int, layers: Sequence[LayerCost]) -> tuple[StagePrice, ...]:
        return tuple(
            stage_price(
                layers,
                stage,
                arrangement=arrangement,
                groups=self.question.groups,
                constants=self.question.constants,
            )
            for arrangement in self._buckets
        )

    def _priced(self, modes: tuple[Recompute, ...], prices: tuple[StagePrice, ...]) -> Offer:
        question, load = self.question, prices[0].load
        times = times_of([prices[0].seconds], [])[0]
        return Offer(
            modes=modes,
            times=times,
            least_times=times,
            least_reduction_seconds=min(one.reduction_seconds for one in prices),
            first_gather_seconds=prices[0].data.first_forward,
            optimizer_seconds=prices[0].optimizer_seconds,
            state_bytes=float(state_bytes(load, question.arrangement)),
            saved_bytes=float(load.saved_bytes),
            deferred_bytes=float(load.deferred_bytes),
            work_bytes=float(work_bytes(load, question.arrangement)),
            splits_backward=load.splits_backward,
            exact_prices=lambda: prices,
        )

    def _fits(self, stage: int, offer: Offer) -> bool:
        rank = self.question.ranks[stage]
        memory = memory_of(
            [offer.price.load],
            self.question.moments[rank],
            self.question.arrangement,
            self.question.constants,
        )
        return memory.device_bytes <= self.question.limit_bytes[rank]

    def _unhidden(self, stage: int, content: Content) -> _Unhidden:
        """Return the least seconds that data parallelism adds to a backward of any length."""
        kind = self.question.kinds[stage]
        layers = [
            replace(
                self.question.layer(kind, number)[Recompute.NONE],
                backward_seconds=_ENDLESS_SECONDS,
            )
            for number in content
        ]
        prices = self._prices(stage, layers)
        return _Unhidden(
            wait_seconds=prices[0].data.backward_wait,
            reduction_seconds=min(one.reduction_seconds for one in prices),
        )

    def _least_backward(self, plain: Offer, mixes: Mixes, place: int, unhidden: _Unhidden) -> float:
        """Return a lower bound on the seconds of a mix's backward, with its collectives."""
        more = float(mixes.seconds[place] - mixes.seconds[0])
        if not self.question.arrangement.reduces_each:
            return float(plain.times[1]) + more
        alone = float(plain.times[1]) - plain.price.data.backward_wait
        return max(float(plain.times[1]), alone + more + unhidden.wait_seconds)


@lru_cache(maxsize=4096)
def fullest(moments: Moments) -> tuple[int, ...]:
    """Return the moments at which a rank may need most memory.

    For each running stage, these are the moments that no other moment equals or exceeds in every
    count of microbatches.
    """
    held = np.concatenate([moments.forwarded, moments.unanswered, moments.halfway], axis=1)
    kept: list[int] = []
    for running in np.unique(moments.running):
        rows = np.flatnonzero(moments.running == running)
        _, places = np.unique(held[rows], axis=0, return_index=True)
        own = held[rows[places]]
        is_below = np.ones((len(own), len(own)), dtype=np.bool_)
        for amounts in own.T:  # a count at a time, because numpy is slow at summing many short rows
            is_below &= amounts[:, None] <= amounts
        kept += rows[places][is_below.sum(axis=1) == 1].tolist()  # except itself
    return tuple(kept)


class RankMemory:
    """The peak memory of a rank, for each choice of offers for its stages."""

    def __init__(
        self, question: StageQuestion, rank: int, offers: Sequence[Sequence[Offer]]
    ) -> None:
        moments = question.moments[rank]
        kept = list(fullest(moments))
        self.limit_bytes = most_tensor_bytes(
            question.limit_bytes[rank], question.arrangement, question.constants
        )
        self._running = moments.running[kept]
        self._held = [
            np.array([one.bytes_over_time(moments, place)[kept] for one in own])
            for place, own in enumerate(offers)
        ]
        self._work = [np.array([one.work_bytes for one in own]) for own in offers]

    def needed_bytes(self, way: Sequence[int]) -> float:
        """Return the peak if each stage takes the offer with its number in `way`."""
        return float(self.needed_with(way, 0)[way[0]])

    def needed_with(self, way: Sequence[int], changed: int) -> Floats:
        """Return the peak for each offer of stage `changed`, if others take theirs from `way`."""
        others = [place for place in range(len(way)) if place != changed]
        held = self._held[changed] + sum(self._held[place][way[place]] for place in others)
        for place in others:
            held = held + np.where(self._running == place, self._work[place][way[place]], 0.0)
        held = held + np.where(self._running == changed, self._work[changed][:, None], 0.0)
        return np.asarray(held.max(axis=1))
