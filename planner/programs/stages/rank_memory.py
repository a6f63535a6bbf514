"""Adds up what the stages of one rank hold together, for many ways to run them at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.planner.costs.schedules.moments import Moments
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.steps.memory import most_tensor_bytes
from autopar.planner.programs.stages.offers import Offer
from autopar.planner.programs.stages.question import StageQuestion


@lru_cache(maxsize=4096)
def fullest(moments: Moments) -> tuple[int, ...]:
    """Return the moments at which no other one, of the same running stage, holds as much of all."""
    held = np.concatenate([moments.forwarded, moments.unanswered, moments.halfway], axis=1)
    kept: list[int] = []
    for running in np.unique(moments.running):
        rows = np.flatnonzero(moments.running == running)
        _, places = np.unique(held[rows], axis=0, return_index=True)
        own = held[rows[places]]
        is_below = np.ones((len(own), len(own)), dtype=np.bool_)
        for amounts in own.T:  # a stage at a time: of all at once, numpy adds up few very often
            is_below &= amounts[:, None] <= amounts
        kept += rows[places][is_below.sum(axis=1) == 1].tolist()  # but itself
    return tuple(kept)


class RankMemory:
    """The bytes of one rank by the offers of its stages."""

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
            np.array([one.held_bytes(moments, place)[kept] for one in own])
            for place, own in enumerate(offers)
        ]
        self._work = [np.array([one.work_bytes for one in own]) for own in offers]

    def needed_bytes(self, way: Sequence[int]) -> float:
        """Return the most that is held at once when each stage takes one of its offers."""
        return float(self.needed_with(way, 0)[way[0]])

    def needed_with(self, way: Sequence[int], changed: int) -> Floats:
        """Return the same for every offer of one stage, the other stages as they are."""
        others = [place for place in range(len(way)) if place != changed]
        held = self._held[changed] + sum(self._held[place][way[place]] for place in others)
        for place in others:
            held = held + np.where(self._running == place, self._work[place][way[place]], 0.0)
        held = held + np.where(self._running == changed, self._work[changed][:, None], 0.0)
        return np.asarray(held.max(axis=1))
