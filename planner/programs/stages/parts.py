"""Lists the pieces of layers that each stage may have, and the memory that ranks hold for them.

working   W of a stage  ≥  Σ (working bytes of a piece ÷ the most layers of a stage) · x
          W of a stage  ≥  working bytes of a layer that must be on this stage, as the head is
memory    Σ (state + held · saved) · x  +  W of the running stage  ≤  the rank's limit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.memory import (
    layer_state_bytes,
    layer_unsharded_bytes,
    most_tensor_bytes,
)
from autopar.planner.programs.solver import GrowingProgram
from autopar.planner.programs.stages.offers import fullest
from autopar.planner.programs.stages.question import StageQuestion

_SLACK = 1e-6  # of a rank's memory: allows for rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPiece:
    """Layers of a class in one mode; `is_split`: with a split backward."""

    number: int  # of the class
    cost: LayerCost
    is_split: bool
    state_bytes: float
    working_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PieceOnStage:
    """A piece on a stage."""

    stage: int
    piece: LayerPiece
    column: int  # of the program


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
            state_bytes=float(layer_state_bytes(cost, arrangement)),
            working_bytes=float(cost.transient_bytes + layer_unsharded_bytes(cost, arrangement)),
        )
        for cost in costs
        for is_split in ((True, False) if splits and not cost.recompute_seconds else (False,))
    ]


def add_work(program: GrowingProgram, parts: StageParts, limit_bytes: float) -> int:
    """Add a stage's working memory, as a share of its rank's limit.

    It is that of the largest layer, and so at least the mean of the stage's layers.
    """
    work = program.column()
    needed = {one.column: one.piece.working_bytes / limit_bytes for one in parts.pieces}
    least = min(needed.values())
    terms = [(column, (own - least) / parts.most_layers) for column, own in needed.items()]
    program.add([*terms, (work, -1.0)], most=-least)
    program.add([(work, -1.0)], most=-parts.forced_bytes / limit_bytes)
    return work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Σ bytes · x + work ≤ 1, as shares of a rank's limit."""

    columns: Numbers
    shares: Floats
    most: float = 1.0 + _SLACK


class RankMoments:
    """A rank's memory at each of its peaks, per layer of each piece on its stages."""

    def __init__(
        self,
        question: StageQuestion,
        rank: int,
        parts: Sequence[StageParts],
        program: GrowingProgram,
    ) -> None:
        arrangement, moments = question.arrangement, question.moments[rank]
        stages, places = question.stages_of[rank], list(fullest(moments))
        limit = most_tensor_bytes(question.limit_bytes[rank], arrangement, question.constants)
        own = [(place, part) for place, stage in enumerate(stages) for part in parts[stage].pieces]
        pieces = [part.piece for _, part in own]
        at = np.array([place for place, _ in own])
        is_split = np.array([one.is_split for one in pieces])
        saved = np.array([float(one.cost.saved_bytes) for one in pieces])
        deferred = np.array([float(one.cost.deferred_bytes) for one in pieces])
        state = np.array([one.state_bytes for one in pieces])
        split = saved * moments.forwarded[places][:, at] + deferred * moments.halfway[places][:, at]
        whole = saved * moments.unanswered[places][:, at]
        work = [add_work(program, parts[stage], limit) for stage in stages]
        is_running = moments.running[places][:, None] == np.arange(len(stages))
        self._columns = np.array([*(part.column for _, part in own), *work])
        self._held = np.concatenate(
            [(state + np.where(is_split, split, whole)) / limit, is_running], axis=1
        )
        self._added: set[int] = set()

    @property
    def likely(self) -> int:
        """The peak that is largest if all pieces are equally many."""
        return int(np.argmax(self._held.sum(axis=1)))

    def row_at(self, moment: int) -> MemoryRow:
        """Return the row of a moment."""
        self._added.add(moment)
        held = np.flatnonzero(self._held[moment])
        return MemoryRow(columns=self._columns[held], shares=self._held[moment, held])

    def exceeded(self, program: GrowingProgram) -> Iterator[MemoryRow]:
        """Yield the row of the most exceeded moment in the optimum, if any."""
        over = self._held @ program.values(self._columns) - 1.0 - _SLACK
        worst = int(np.argmax(over))
        if over[worst] > _SLACK and worst not in self._added:
            yield self.row_at(worst)
