"""Lists the layers that stages may have where layers are divisible, and what ranks hold then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.memory import (
    layer_state_bytes,
    layer_unsharded_bytes,
    most_tensor_bytes,
)
from autopar.planner.programs.growing import GrowingProgram, Term
from autopar.planner.programs.stages.question import StageQuestion
from autopar.planner.programs.stages.rank_memory import fullest

_SLACK = 1e-6  # of a rank's memory: what is rounded up


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Layers of a class on a stage, in one mode; `is_split`: with their backward in two halves."""

    stage: int
    number: int  # of the class
    cost: LayerCost
    is_split: bool
    column: int  # of the program


def parts_of(question: StageQuestion, program: GrowingProgram) -> list[list[Part]]:
    """Return the layers that each stage may have, each with a column."""
    return [list(_parts(question, stage, program)) for stage in range(question.shape.stages)]


def _parts(question: StageQuestion, stage: int, program: GrowingProgram) -> Iterator[Part]:
    """Yield those of one stage: layer i is on no later stage than i."""
    kind, left = question.kinds[stage], question.shape.stages - 1 - stage
    last = len(question.classes) - 1
    own = dict.fromkeys(
        number
        for place, number in enumerate(question.classes)
        if stage <= place and left <= last - place
    )
    splits = stage > 0 and SCHEDULES[question.arrangement.schedule].splits_backward
    for number in own:
        for mode in question.modes_of(kind, number):
            cost = question.layer(kind, number)[mode]
            for is_split in (True, False) if splits and not cost.recompute_seconds else (False,):
                column = program.column()
                yield Part(stage=stage, number=number, cost=cost, is_split=is_split, column=column)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Σ bytes · x ≤ what is left, as shares of a rank's limit."""

    terms: list[Term]
    most: float


class RankMoments:
    """What one rank holds at each of its full moments, for a layer of each part of its stages."""

    def __init__(self, question: StageQuestion, rank: int, parts: Sequence[Sequence[Part]]) -> None:
        arrangement, moments = question.arrangement, question.moments[rank]
        stages, places = question.stages_of[rank], fullest(moments)
        own = [(place, part) for place, stage in enumerate(stages) for part in parts[stage]]
        at = np.array([place for place, _ in own])
        is_split = np.array([part.is_split for _, part in own])
        saved = np.array([float(part.cost.saved_bytes) for _, part in own])
        deferred = np.array([float(part.cost.deferred_bytes) for _, part in own])
        state = np.array([float(layer_state_bytes(part.cost, arrangement)) for _, part in own])
        split = saved * moments.forwarded[places][:, at] + deferred * moments.halfway[places][:, at]
        whole = saved * moments.unanswered[places][:, at]
        working = np.array(
            [
                min(
                    part.cost.transient_bytes + layer_unsharded_bytes(part.cost, arrangement)
                    for part in parts[stage]
                )
                for stage in stages
            ]
        )
        limit = most_tensor_bytes(question.limit_bytes[rank], arrangement, question.constants)
        self._columns = [part.column for _, part in own]
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
        terms = zip(self._columns, self._held[moment].tolist(), strict=True)
        return MemoryRow(terms=list(terms), most=float(self._most[moment]))

    def exceeded(self, program: GrowingProgram) -> Iterator[MemoryRow]:
        """Yield the row of the moment at which most is too much in the optimum, if any is."""
        over = self._held @ program.values(self._columns) - self._most
        worst = int(np.argmax(over))
        if over[worst] > _SLACK and worst not in self._added:
            yield self.row_at(worst)
