"""Prices what layers can be as a stage: offers, each with its seconds, its bytes and its modes.

One stage per rank has all memory of its rank, so only what fits is offered. Several share it: then
all mixes are offered that no other betters, and the rank's memory is a matter of the program.
A stage whose layers fit as they are computes none of them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.costs.prediction import LayerCost, Recompute, Zero
from autopar.planner.costs.schedules.moments import Moments
from autopar.planner.costs.schedules.paths import Floats, times_of
from autopar.planner.costs.steps.memory import memory_of, state_bytes, work_bytes
from autopar.planner.costs.steps.stage_price import StagePrice, stage_price
from autopar.planner.costs.steps.step import stage_optimizer_seconds
from autopar.planner.programs.stages.mixes import Mixes, hull, mixes_of
from autopar.planner.programs.stages.question import Content, StageQuestion

_MOST_PRICED = 12  # mixes of one content on one stage
_MOST_PRICED_ALONE = 64  # where it is the only stage
_MOST_BETWEEN = 48  # where a rank's memory is filled up
_ROUNDING = 1e-9
_ENDLESS_SECONDS = 1e3  # a backward beside which every reduction but the last is hidden


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """One way to run some layers as a stage.

    `times` are what a schedule counts, but for the transfer. `least_times` and `least_reduction`
    are no more than those of any mix of these layers that takes as long or longer and is not
    offered.
    """

    modes: tuple[Recompute, ...]
    prices: tuple[StagePrice, ...]  # by bucket size
    times: Floats
    least_times: Floats
    least_reduction_seconds: float
    optimizer_seconds: float
    state_bytes: float
    work_bytes: float  # of the layer that needs most while it runs
    is_whole: bool = True  # whether every mix of these layers that is not offered is worse

    @property
    def price(self) -> StagePrice:
        """The price with the first bucket size: others differ in the reduction alone."""
        return self.prices[0]

    @property
    def seconds(self) -> float:
        """Of one microbatch, both passes."""
        return float(self.least_times[0] + max(self.least_times[1], self.least_times[2:4].sum()))

    def held_bytes(self, moments: Moments, place: int) -> Floats:
        """Return the bytes of this stage at each moment of its rank, the running layer's aside."""
        load = self.price.load
        if not load.splits_backward:
            return self.state_bytes + load.saved_bytes * moments.unanswered[:, place].astype(float)
        held = load.saved_bytes * moments.forwarded[:, place].astype(float)
        return self.state_bytes + held + load.deferred_bytes * moments.halfway[:, place]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hidden:
    """What sharing data adds to a backward, and after it, if all that can be hidden is."""

    wait_seconds: float
    reduction_seconds: float


class Offers:
    """The offers of one question, priced when they are asked for."""

    def __init__(self, question: StageQuestion) -> None:
        self.question = question
        self._known: dict[object, tuple[Offer, ...]] = {}
        self._mixes: dict[tuple[int, Content], Mixes] = {}
        self._buckets = [
            replace(question.arrangement, bucket_bytes=size) for size in question.bucket_bytes
        ]

    def of(self, stage: int, content: Content) -> tuple[Offer, ...]:
        """Return the offers of some layers on a stage, the fastest first; none fits: none."""
        question = self.question
        rank, kind = question.ranks[stage], question.kinds[stage]
        if question.shape.stages_per_rank > 1:
            key: tuple[object, ...] = kind, stage == 0, content
        else:
            held = question.moments[rank].key
            key = kind, stage == 0, held, question.limit_bytes[rank], content
        if key not in self._known:
            made = self._shared if question.shape.stages_per_rank > 1 else self._fitting
            self._known[key] = tuple(made(stage, content))
        return self._known[key]

    def _fitting(self, stage: int, content: Content) -> Iterator[Offer]:
        """Yield what fits of a rank's only stage, until nothing that follows can be better.

        What follows takes longer. That hides more of the reductions, so it counts until one is
        found whose reductions take no more than they have to.
        """
        mixes = self.mixes(stage, content)
        plain = self._offer(stage, content, mixes, 0)
        if not mixes.again[0] and self._fits(stage, plain):
            yield plain
            return
        hidden = self._hidden(stage, content)
        most = _MOST_PRICED if self.question.shape.stages > 1 else _MOST_PRICED_ALONE
        made: list[Offer] = []
        settled = float("inf")
        for place in self._likely(stage, mixes, plain):
            least = self._least_backward(plain, mixes, place, hidden)
            if least >= settled or len(made) == most:
                break
            offer = self._offer(stage, content, mixes, place)
            if self._fits(stage, offer):
                if not made:
                    first = least
                made.append(offer)
                if offer.least_reduction_seconds <= hidden.reduction_seconds * (1.0 + _ROUNDING):
                    settled = min(settled, float(offer.times[1]))
        if len(made) == most:
            times = made[0].times.copy()
            times[1] = min(times[1], first)
            times[2] = min(times[2], first)
            made[0] = replace(
                made[0],
                least_times=times,
                least_reduction_seconds=hidden.reduction_seconds,
                is_whole=False,
            )
        yield from made

    def _likely(self, stage: int, mixes: Mixes, plain: Offer) -> list[int]:
        """Return the mixes that fit by their sums."""
        rank = self.question.ranks[stage]
        moments = self.question.moments[rank]
        flying = np.where(mixes.again, moments.unanswered.max(), moments.forwarded.max())
        needed = plain.state_bytes + mixes.saved * flying + mixes.work
        return np.flatnonzero(needed <= self.question.limit_bytes[rank]).tolist()

    def _shared(self, stage: int, content: Content) -> Iterator[Offer]:
        """Yield the mixes of one of several stages of a rank, thinned where there are many."""
        mixes = self.mixes(stage, content)
        is_whole = len(mixes) <= _MOST_PRICED
        if not is_whole:
            mixes = mixes.taken(np.array(hull(mixes.seconds.tolist(), mixes.saved.tolist())))
        for place in range(len(mixes)):
            offer = self._offer(stage, content, mixes, place)
            yield offer if is_whole else replace(offer, is_whole=False)

    def every(self, stage: int, content: Content) -> tuple[Offer, ...]:
        """Return offers in between as well, as many as may be told apart."""
        key = "every", self.question.kinds[stage], stage == 0, content
        if key not in self._known:
            mixes = self.mixes(stage, content)
            step = -(-len(mixes) // _MOST_BETWEEN)
            places = sorted({*range(0, len(mixes), step), len(mixes) - 1})
            self._known[key] = tuple(self._offer(stage, content, mixes, place) for place in places)
        return self._known[key]

    def mixes(self, stage: int, content: Content) -> Mixes:
        """Return the mixes of some layers on a stage."""
        key = self.question.kinds[stage], content
        if key not in self._mixes:
            self._mixes[key] = mixes_of(self.question, *key)
        return self._mixes[key]

    def exact(self, stage: int, content: Content, modes: Sequence[Recompute]) -> Offer:
        """Return an offer of given modes, whether or not it fits."""
        kind = self.question.kinds[stage]
        layers = [
            self.question.layer(kind, number)[mode]
            for number, mode in zip(content, modes, strict=True)
        ]
        return self._priced(stage, layers, tuple(modes))

    def _offer(self, stage: int, content: Content, mixes: Mixes, place: int) -> Offer:
        return self.exact(stage, content, mixes.modes(place, content))

    def _priced(
        self, stage: int, layers: Sequence[LayerCost], modes: tuple[Recompute, ...]
    ) -> Offer:
        question = self.question
        prices = tuple(
            stage_price(
                layers,
                stage,
                arrangement=arrangement,
                groups=question.groups,
                constants=question.constants,
            )
            for arrangement in self._buckets
        )
        load = prices[0].load
        times = times_of([prices[0].seconds], [])[0]
        return Offer(
            modes=modes,
            prices=prices,
            times=times,
            least_times=times,
            least_reduction_seconds=min(one.reduction_seconds for one in prices),
            optimizer_seconds=stage_optimizer_seconds(
                load,
                question.ranks[stage],
                question.groups,
                question.arrangement,
                question.constants,
            ),
            state_bytes=float(state_bytes(load, question.arrangement)),
            work_bytes=float(work_bytes(load, question.arrangement)),
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

    def _hidden(self, stage: int, content: Content) -> _Hidden:
        """Return what sharing data takes at least, beside whatever backward."""
        kind = self.question.kinds[stage]
        layers = [
            replace(
                self.question.layer(kind, number)[Recompute.NONE],
                backward_seconds=_ENDLESS_SECONDS,
            )
            for number in content
        ]
        offer = self._priced(stage, layers, (Recompute.NONE,) * len(layers))
        return _Hidden(
            wait_seconds=offer.price.data.backward_wait,
            reduction_seconds=offer.least_reduction_seconds,
        )

    def _least_backward(self, plain: Offer, mixes: Mixes, place: int, hidden: _Hidden) -> float:
        """Return what a mix's backward takes at least: its layers' time, or the collectives'."""
        more = float(mixes.seconds[place] - mixes.seconds[0])
        if self.question.arrangement.zero < Zero.GRADIENTS:
            return float(plain.times[1]) + more
        alone = float(plain.times[1]) - plain.price.data.backward_wait
        return max(float(plain.times[1]), alone + more + hidden.wait_seconds)
