"""Lower bounds of cuts by shortest paths; columns and memory rows of the programs that find cuts.

A column of the stage program is a possible stage: an interval of layers, and an offer. Its times
are those of the forward, of the backward, of the backward's two halves, and of the transfer to the
next stage: in the order in which a chain counts them.

Shortest paths bound every cut of GPipe and 1F1B. A cut is a path: stage p leads from its first
layer to its end. If s is the slowest stage, the step takes at least

    Σ_{q<s} passes_q  +  own_s              own_s = m · (f + b) + its wait for later stages

m is the number of microbatches. f and b are the forward and the backward of one, each with the
transfer that the rank waits for; `passes` is f + b. The least sum of passes of the stages behind
an interval bounds how long its stage waits, and so gives `own`. The least maximum over all stages
is then a shortest path, too:

    H_p(i)  =  min over j of  max(own_p(i,j), passes_p(i,j) + H_{p+1}(j))

H_0(0) is the step of the best cut, not only a bound, if the sums of passes are the same for every
cut, as without recomputation. An interval is excluded if every cut with it takes at least as long
as the best known cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.paths import TRANSFER
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, in_flight
from autopar.planner.costs.steps.bounds import DataBound
from autopar.planner.costs.steps.memory import layer_unsharded_bytes, most_tensor_bytes
from autopar.planner.costs.steps.state import state_bytes
from autopar.planner.programs.growing import GrowingProgram
from autopar.planner.programs.stages.offers import Offer, Offers, fullest
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
    """Return forward and backward of columns, each with the transfer that the rank waits for."""
    every = list(columns)
    forward = np.array(
        [one.times[0] + (transfers[one.first - 1] if one.first else 0.0) for one in every]
    )
    backward = np.array([one.times[1] + one.times[TRANSFER] for one in every])
    return forward, backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutBounds:
    """Lower bounds of all cuts, and of the cuts with each column; and a cut close to the bound."""

    seconds: float
    of_columns: Floats
    cut: Cut  # empty: none


def cut_bounds(
    question: StageQuestion, columns: list[Column], transfers: tuple[float, ...]
) -> CutBounds:
    """Return lower bounds of the time in the pipeline, without the rest of a step."""
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
    return CutBounds(
        seconds=float(later[0, 0]),
        of_columns=of_columns,
        cut=_walk(columns, slices, own_seconds, chain.passes, later),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """The seconds of each column with the transfers that it waits for; `passes` is their sum."""

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
        """Return `own` of each column: its time if its stage is the slowest.

        For each column, `behind` has the least sum of the later stages' passes, `stage` its stage.
        """
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
    """Return the cut with the least maximum over its stages; () if there is none."""
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


_SLACK = 1e-6  # by this share, rounded sums may exceed a rank's memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPiece:
    """One layer of a class in one mode; `is_split`: its backward is split into halves."""

    number: int  # of the class
    cost: LayerCost
    is_split: bool
    state_bytes: float
    working_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceOnStage:
    """A piece as it may occur on a stage."""

    stage: int
    piece: LayerPiece
    column: int  # of the program: how many such layers the stage has


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageParts:
    """The possible pieces of a stage, each with a column of the program."""

    pieces: tuple[PieceOnStage, ...]
    most_layers: int
    forced_bytes: float  # working bytes of layers that are on this stage in every cut

    @property
    def columns(self) -> list[int]:
        """The columns of its pieces."""
        return [one.column for one in self.pieces]


def parts_of(
    question: StageQuestion, program: GrowingProgram, longest: int
) -> tuple[StageParts, ...]:
    """Return each stage's possible pieces, if no stage has more layers than `longest`."""
    made = cache(partial(_pieces, question))
    parts = []
    for stage, kind in enumerate(question.kinds):
        (first, latest), (end, stop) = question.windows[stage], question.windows[stage + 1]
        own = dict.fromkeys(question.classes[first:stop])
        pieces = tuple(
            PieceOnStage(stage=stage, piece=one, column=program.column())
            for number in own
            for one in made(kind, number, stage > 0)
        )
        forced = [
            min(one.working_bytes for one in made(kind, number, stage > 0))
            for number in dict.fromkeys(question.classes[latest:end])
        ]
        parts.append(
            StageParts(
                pieces=pieces,
                most_layers=min(longest, stop - first),
                forced_bytes=max(forced, default=0.0),
            )
        )
    return tuple(parts)


def _pieces(question: StageQuestion, kind: int, number: int, has_before: bool) -> list[LayerPiece]:
    """Return the pieces of a class on a kind of rank; the first stage splits no backward."""
    arrangement = question.arrangement
    splits = has_before and SCHEDULES[arrangement.schedule].splits_backward
    costs = [question.layer(kind, number)[mode] for mode in question.modes_of(kind, number)]
    return [
        LayerPiece(
            number=number,
            cost=cost,
            is_split=is_split,
            state_bytes=float(state_bytes(cost, arrangement)),
            working_bytes=float(cost.transient_bytes + layer_unsharded_bytes(cost, arrangement)),
        )
        for cost in costs
        for is_split in ((True, False) if splits and not cost.recompute_seconds else (False,))
    ]


def piece_seconds(data: DataBound, piece: LayerPiece) -> tuple[float, float, float, float]:
    """Return the least seconds that a layer adds to its stage, by kind of action."""
    cost = piece.cost
    forward = cost.forward_seconds + data.each_forward_more(cost)
    backward = cost.backward_seconds + data.each_backward_more(cost)
    if not piece.is_split:
        return forward, backward, backward, 0.0
    gradients = data.gradients(cost.gradient_bytes, cost.trainable_tensors)
    weights = cost.weight_gradient_seconds + gradients
    return forward, backward, backward - weights, weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Σ bytes · x + work ≤ 1, as shares of a rank's limit."""

    columns: Numbers
    shares: Floats
    most: float = 1.0 + _SLACK


class RankMoments:
    """A rank's memory at each moment that may be its peak, by the pieces on its stages."""

    def __init__(
        self,
        question: StageQuestion,
        rank: int,
        parts: Sequence[StageParts],
        add_work: Callable[[int, float], int],
    ) -> None:
        moments, stages = question.moments[rank], question.stages_of[rank]
        places = list(fullest(moments))
        limit = most_tensor_bytes(
            question.limit_bytes[rank], question.arrangement, question.constants
        )
        own = [(place, part) for place, stage in enumerate(stages) for part in parts[stage].pieces]
        pieces = [part.piece for _, part in own]
        at = np.array([place for place, _ in own])
        is_split = np.array([one.is_split for one in pieces])
        saved = np.array([float(one.cost.saved_bytes) for one in pieces])
        deferred = np.array([float(one.cost.deferred_bytes) for one in pieces])
        state = np.array([one.state_bytes for one in pieces])
        split = saved * moments.forwarded[places][:, at] + deferred * moments.halfway[places][:, at]
        whole = saved * moments.unanswered[places][:, at]
        work = [add_work(stage, limit) for stage in stages]
        is_running = moments.running[places][:, None] == np.arange(len(stages))
        self._columns = np.array([*(part.column for _, part in own), *work])
        self._held = np.concatenate(
            [(state + np.where(is_split, split, whole)) / limit, is_running], axis=1
        )
        self._added: set[int] = set()

    @property
    def likely(self) -> int:
        """The moment with most memory if the stages have equally many layers of each piece."""
        return int(np.argmax(self._held.sum(axis=1)))

    def row_at(self, moment: int) -> MemoryRow:
        """Return the row of a moment."""
        self._added.add(moment)
        held = np.flatnonzero(self._held[moment])
        return MemoryRow(columns=self._columns[held], shares=self._held[moment, held])

    def exceeded(self, program: GrowingProgram) -> Iterator[MemoryRow]:
        """Yield the row of the moment at which the optimum exceeds the limit most, if it does."""
        over = self._held @ program.values(self._columns) - 1.0 - _SLACK
        worst = int(np.argmax(over))
        if over[worst] > _SLACK and worst not in self._added:
            yield self.row_at(worst)
