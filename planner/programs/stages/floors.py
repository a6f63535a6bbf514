"""Bounds of the stages without a program.

Makes the columns of the stage program: what each stage may be, and what that adds to a step.

seconds   forward, backward, halves of a backward, transfer to the next stage: as chains count
          them; where a rank waits for what it receives, that is in its forward and backward

Bounds every cut of GPipe and 1F1B by shortest paths.

A cut is a path: stage p goes from the place where it begins to the one where it ends. Whatever the
others are, a stage s that is the slowest one takes part in a step of

    Σ_{q<s} passes_q  +  own_s              own_s = m · (f + b) + what it waits for later stages

`passes` is what one microbatch needs there and back. With least sums of passes before a place and
behind it, `own` is known for every interval, and the least maximum over all stages is a shortest
path as well:

    H_p(i)  =  min over j of  max(own_p(i,j), passes_p(i,j) + H_{p+1}(j))

H_0(0) is exact where sums do not depend on the cut: where nothing is computed again. An interval
is closed if every cut with it takes no less than what is to be beaten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.paths import TRANSFER
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.programs.stages.offers import Offer, Offers
from autopar.planner.programs.stages.question import Cut, StageQuestion


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floors:
    """The least that cuts take: of all, of those with each column; and a cut close to that."""

    seconds: float
    of_columns: Floats
    cut: Cut  # empty: no cut


def floors_of(
    question: StageQuestion, columns: list[Column], transfers: tuple[float, ...]
) -> Floors:
    """Return the floors of the pipeline alone; columns are grouped by stage."""
    count, stages = len(question.classes), question.shape.stages
    chain = _Chain.of(question, columns, transfers)
    stage = np.array([one.stage for one in columns])
    first = np.array([one.first for one in columns])
    stop = np.array([one.stop for one in columns])
    slices = [np.flatnonzero(stage == p) for p in range(stages)]

    before = np.full((stages + 1, count + 1), np.inf)
    behind = np.full((stages + 1, count + 1), np.inf)
    before[0, 0] = behind[stages, count] = 0.0
    for p in range(stages):
        own = slices[p]
        np.minimum.at(before[p + 1], stop[own], before[p, first[own]] + chain.passes[own])
    for p in reversed(range(stages)):
        own = slices[p]
        np.minimum.at(behind[p], first[own], behind[p + 1, stop[own]] + chain.passes[own])

    own_seconds = chain.own(behind[stage + 1, stop], stage)
    later = np.full((stages + 1, count + 1), np.inf)
    later[stages, count] = 0.0
    for p in reversed(range(stages)):
        own = slices[p]
        least = np.maximum(own_seconds[own], chain.passes[own] + later[p + 1, stop[own]])
        np.minimum.at(later[p], first[own], least)
    earlier = np.full((stages + 1, count + 1), np.inf)
    earlier[0, 0] = 0.0
    alone = before[stage, first] + own_seconds
    for p in range(stages):
        own = slices[p]
        least = np.maximum(earlier[p, first[own]], alone[own])
        np.minimum.at(earlier[p + 1], stop[own], least)

    rest = before[stage, first] + chain.passes + later[stage + 1, stop]
    of_columns = np.maximum(np.maximum(alone, earlier[stage, first]), rest)
    return Floors(
        seconds=float(later[0, 0]),
        of_columns=of_columns,
        cut=_walk(columns, slices, own_seconds, chain.passes, later),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """What each column adds to cuts: to later stages, and as the slowest one."""

    question: StageQuestion
    passes: Floats
    forward: Floats
    backward: Floats

    @staticmethod
    def of(question: StageQuestion, columns: list[Column], transfers: tuple[float, ...]) -> _Chain:
        forward, backward = received(columns, transfers)
        return _Chain(
            question=question, passes=forward + backward, forward=forward, backward=backward
        )

    def own(self, behind: Floats, stage: Numbers) -> Floats:
        """Return what a stage takes as the slowest one, with the least that is behind it."""
        shape, kind = self.question.shape, self.question.arrangement.schedule
        busy = shape.microbatches * (self.forward + self.backward)
        if kind is ScheduleKind.GPIPE:
            return busy + behind
        fillers = np.minimum(shape.microbatches, shape.stages - stage) - 1
        waits = [np.maximum(0.0, behind - fillers * one) for one in (self.forward, self.backward)]
        both = shape.microbatches > fillers + 1
        return busy + np.where(both, waits[0] + waits[1], np.maximum(waits[0], waits[1]))


def _walk(
    columns: list[Column],
    slices: list[Numbers],
    own_seconds: Floats,
    passes: Floats,
    later: Floats,
) -> Cut:
    """Return the cut of the least maximum."""
    if not np.isfinite(later[0, 0]):
        return ()
    place, cut = 0, [0]
    for p, own in enumerate(slices):
        here = [number for number in own.tolist() if columns[number].first == place]
        best = min(
            here,
            key=lambda number: max(
                own_seconds[number], passes[number] + later[p + 1, columns[number].stop]
            ),
        )
        place = columns[best].stop
        cut.append(place)
    return tuple(cut)
