"""Lower bounds of stages without a program.

Makes the columns of the stage program: possible stages, and what each adds to a step.

    seconds   forward, backward, halves of a backward, transfer to the next stage, in a chain's
              order; if a rank waits to receive, this is included in forward and backward

Bounds every cut of GPipe and 1F1B by shortest paths. A cut is a path: stage p goes from its first
layer to its end. If s is the slowest stage, the step takes at least

    Σ_{q<s} passes_q  +  own_s              own_s = m · (f + b) + what it waits for later stages

`passes` is the time of one microbatch, forward and back. With the least sums of passes before and
behind a place, `own` is known for every interval, and the least maximum over all stages is a
shortest path, too:

    H_p(i)  =  min over j of  max(own_p(i,j), passes_p(i,j) + H_{p+1}(j))

H_0(0) is exact if sums do not depend on the cut: without recomputation. An interval is excluded if
every cut with it takes at least the value to beat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.schedules.moments import in_flight
from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.paths import TRANSFER
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.programs.stages.offers import Offer, Offers
from autopar.planner.programs.stages.question import Cut, StageQuestion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Column:
    """Layers `first` to `stop` − 1 as a stage, run according to an offer."""

    stage: int
    first: int
    stop: int
    offer: Offer
    times: Floats  # the least, including the transfer to the next stage


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
        """Return the columns of intervals (stage, first, stop)."""
        return [one for stage, first, stop in intervals for one in self.of(stage, first, stop)]


def with_transfer(times: Floats, transfer_seconds: float) -> Floats:
    """Return the times of a stage including the transfer to the next one."""
    found = times.copy()
    found[TRANSFER] = transfer_seconds
    return found


def received(columns: Iterable[Column], transfers: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return forward and backward of columns, including waits for transfers on demand."""
    every = list(columns)
    forward = np.array(
        [one.times[0] + (transfers[one.first - 1] if one.first else 0.0) for one in every]
    )
    backward = np.array([one.times[1] + one.times[TRANSFER] for one in every])
    return forward, backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Floors:
    """Lower bounds: of all cuts, and of those with each column; and a cut close to that."""

    seconds: float
    of_columns: Floats
    cut: Cut  # empty: none


def floors_of(
    question: StageQuestion, columns: list[Column], transfers: tuple[float, ...]
) -> Floors:
    """Return the lower bounds of the pipeline alone; columns are grouped by stage."""
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
        """Return a stage's time as the slowest one, with the least behind it."""
        shape, kind = self.question.shape, self.question.arrangement.schedule
        busy = shape.microbatches * (self.forward + self.backward)
        if kind is ScheduleKind.GPIPE:
            return busy + behind
        held = np.array(in_flight(kind, shape))[stage]
        fillers = held - 1
        waits = [np.maximum(0.0, behind - fillers * one) for one in (self.forward, self.backward)]
        both = shape.microbatches > held
        return busy + np.where(both, waits[0] + waits[1], np.maximum(waits[0], waits[1]))


def _walk(
    columns: list[Column],
    slices: list[Numbers],
    own_seconds: Floats,
    passes: Floats,
    later: Floats,
) -> Cut:
    """Return the cut with the least maximum."""
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
