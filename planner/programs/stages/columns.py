"""Makes the columns of the stage program: what each stage may be, and what that adds to a step.

seconds   forward, backward, halves of a backward, transfer to the next stage: as chains count
          them; where a rank waits for what it receives, that is in its forward and backward
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.schedules.paths import TRANSFER
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.programs.stages.offers import Offer, Offers
from autopar.planner.programs.stages.question import StageQuestion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """Layers `first` up to, not including, `stop` as a stage, run as an offer says."""

    stage: int
    first: int
    stop: int
    offer: Offer
    times: Floats  # the least, with the transfer to the next stage


class Columns:
    """The columns of one question."""

    def __init__(self, question: StageQuestion) -> None:
        self.question = question
        self.offers = Offers(question)
        sent = [question.rows[0][place] for place in range(len(question.classes))]
        sizes = [next(iter(modes.values())).output_bytes for modes in sent]
        known = {size: question.groups.transfer_seconds(size) for size in set(sizes)}
        is_alone = question.arrangement.pipeline == 1
        self.transfers = tuple(
            0.0 if is_alone or place == len(sizes) - 1 else known[size]
            for place, size in enumerate(sizes)
        )

    def of(self, stage: int, first: int, stop: int) -> tuple[Column, ...]:
        """Return the columns of an interval."""
        content = self.question.classes[first:stop]
        return tuple(
            Column(
                stage=stage,
                first=first,
                stop=stop,
                offer=offer,
                times=with_transfer(offer.least_times, self.transfers[stop - 1]),
            )
            for offer in self.offers.of(stage, content)
        )

    def of_all(self, intervals: Iterable[tuple[int, int, int]]) -> list[Column]:
        """Return the columns of many intervals, each a stage and where it begins and ends."""
        return [one for stage, first, stop in intervals for one in self.of(stage, first, stop)]


def with_transfer(times: Floats, transfer_seconds: float) -> Floats:
    """Return the times of a stage with the transfer to the next one."""
    found = times.copy()
    found[TRANSFER] = transfer_seconds
    return found


def received(columns: Iterable[Column], transfers: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return forward and backward of columns with what they wait to receive on demand."""
    every = list(columns)
    forward = np.array(
        [one.times[0] + (transfers[one.first - 1] if one.first else 0.0) for one in every]
    )
    backward = np.array([one.times[1] + one.times[TRANSFER] for one in every])
    return forward, backward
