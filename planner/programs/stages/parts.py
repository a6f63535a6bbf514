"""Lists the layers that stages may have where layers are divisible, and what ranks hold then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.actions import Numbers
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.backward_memory import layer_unsharded_bytes
from autopar.planner.costs.steps.memory import layer_state_bytes, most_tensor_bytes
from autopar.planner.programs.growing import GrowingProgram
from autopar.planner.programs.stages.question import StageQuestion
from autopar.planner.programs.stages.rank_memory import fullest

_SLACK = 1e-6  # of a rank's memory: what is rounded up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Layers of a class in one mode; `is_split`: with their backward in two halves."""

    number: int  # of the class
    cost: LayerCost
    is_split: bool
    state_bytes: float
    working_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A piece on a stage."""

    stage: int
    piece: Piece
    column: int  # of the program


def parts_of(question: StageQuestion, program: GrowingProgram) -> list[list[Part]]:
    """Return what each stage may have, each with a column; layer i is on stage i or before."""
    last, stages = len(question.classes) - 1, question.shape.stages
    pieces = cache(partial(_pieces, question))
    parts = []
    for stage, kind in enumerate(question.kinds):
        own = dict.fromkeys(question.classes[stage : last + 2 - stages + stage])
        found = (piece for number in own for piece in pieces(kind, number, stage > 0))
        parts.append([Part(stage=stage, piece=one, column=program.column()) for one in found])
    return parts


def _pieces(question: StageQuestion, kind: int, number: int, has_before: bool) -> list[Piece]:
    """Return how layers of a class may run on a kind of rank; the first stage splits nothing."""
    arrangement = question.arrangement
    splits = has_before and SCHEDULES[arrangement.schedule].splits_backward
    costs = [question.layer(kind, number)[mode] for mode in question.modes_of(kind, number)]
    return [
        Piece(
            number=number,
            cost=cost,
            is_split=is_split,
            state_bytes=float(layer_state_bytes(cost, arrangement)),
            working_bytes=float(cost.transient_bytes + layer_unsharded_bytes(cost, arrangement)),
        )
        for cost in costs
        for is_split in ((True, False) if splits and not cost.recompute_seconds else (False,))
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Σ bytes · x ≤ what is left, as shares of a rank's limit."""

    columns: Numbers
    shares: Floats
    most: float


class RankMoments:
    """What one rank holds at each of its full moments, for a layer of each part of its stages."""

    def __init__(self, question: StageQuestion, rank: int, parts: Sequence[Sequence[Part]]) -> None:
        arrangement, moments = question.arrangement, question.moments[rank]
        stages, places = question.stages_of[rank], list(fullest(moments))
        own = [(place, part) for place, stage in enumerate(stages) for part in parts[stage]]
        pieces = [part.piece for _, part in own]
        at = np.array([place for place, _ in own])
        is_split = np.array([one.is_split for one in pieces])
        saved = np.array([float(one.cost.saved_bytes) for one in pieces])
        deferred = np.array([float(one.cost.deferred_bytes) for one in pieces])
        state = np.array([one.state_bytes for one in pieces])
        split = saved * moments.forwarded[places][:, at] + deferred * moments.halfway[places][:, at]
        whole = saved * moments.unanswered[places][:, at]
        working = np.array(
            [min(part.piece.working_bytes for part in parts[stage]) for stage in stages]
        )
        limit = most_tensor_bytes(question.limit_bytes[rank], arrangement, question.constants)
        self._columns = np.array([part.column for _, part in own])
        self._held = (state + np.where(is_split, split, whole)) / limit
        self._most = 1.0 - working[moments.running[places]] / limit + _SLACK
        self._added: set[int] = set()

    @property
    def likely(self) -> int:
        """The moment that is the fullest where all parts are equally many."""
        return int(np.argmax(self._held.sum(axis=1) - self._most))

    def row_at(self, moment: int) -> MemoryRow:
        """Return the row of a moment."""
        self._added.add(moment)
        held = np.flatnonzero(self._held[moment])
        return MemoryRow(
            columns=self._columns[held],
            shares=self._held[moment, held],
            most=float(self._most[moment]),
        )

    def exceeded(self, program: GrowingProgram) -> Iterator[MemoryRow]:
        """Yield the row of the moment at which most is too much in the optimum, if any is."""
        over = self._held @ program.values(self._columns) - self._most
        worst = int(np.argmax(over))
        if over[worst] > _SLACK and worst not in self._added:
            yield self.row_at(worst)
