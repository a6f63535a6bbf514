"""The most layers that a stage can have, and the rows of the divisible program that depend on it.

A stage waits in each backward for the tensors of its last layer on the host, and needs as much
working memory as its largest layer. The program of divisible layers knows only the share z of the
stage's layers that are on the host. Then the stage waits for at least z · the least wait, where

    z  ≥  layers on the host  ÷  the most layers of the stage

Working memory has a similar row. The fewer layers a stage can have, the tighter these rows are.
`shorten` tests for each stage whether any cut with a step below a limit has n + 1 layers there. If
none has, the stage has at most n. The tightened rows may shorten other stages in the next round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.programs.growing import GrowingProgram, Term
from autopar.planner.programs.stages.cut_bounds import StageParts
from autopar.planner.programs.stages.question import StageQuestion

_WHOLE = 1e-6  # rounding may put a sum of layers this far below a whole number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LengthRow:
    """A row in which factors of some columns are an amount ÷ the most layers of the stage."""

    row: int
    columns: Numbers
    amounts: Floats


class StageLengths:
    """The rows `stages_are_not_empty` of the program, and those that depend on the most layers."""

    def __init__(
        self, question: StageQuestion, program: GrowingProgram, parts: Sequence[StageParts]
    ) -> None:
        self._question, self._program, self._parts = question, program, parts
        self._most = [own.most_layers for own in parts]
        self._rows = [
            program.add([(column, 1.0) for column in own.columns], most=own.most_layers, least=1.0)
            for own in parts
        ]
        self._dependent: list[list[_LengthRow]] = [[] for _ in parts]

    def add(self, stage: int, amounts: Iterable[Term], others: Iterable[Term], most: float) -> None:
        """Add a row: Σ amount · column ÷ the most layers of a stage  +  Σ others  ≤  `most`."""
        pairs = [(column, amount) for column, amount in amounts if amount]
        columns = np.array([column for column, _ in pairs], dtype=np.int64)
        values = np.array([amount for _, amount in pairs])
        shares = zip(columns.tolist(), (values / self._most[stage]).tolist(), strict=True)
        row = self._program.add([*shares, *others], most=most)
        self._dependent[stage].append(_LengthRow(row=row, columns=columns, amounts=values))

    def add_work(self, stage: int, limit_bytes: float) -> int:
        """Add a column for a stage's working memory, as a share of its rank's limit; return it.

        A stage needs as much as its largest layer: at least the mean over its layers, and at least
        the need of each layer that is on this stage in every cut.
        """
        own, work = self._parts[stage], self._program.column()
        needed = {one.column: one.piece.working_bytes / limit_bytes for one in own.pieces}
        least = min(needed.values())
        more = [(column, need - least) for column, need in needed.items()]
        self.add(stage, more, [(work, -1.0)], -least)
        self._program.add([(work, -1.0)], most=-own.forced_bytes / limit_bytes)
        return work

    def add_waits(self, stage: int, unit_seconds: float) -> list[int]:
        """Add the rows host_is_waited_for; return [H], a stage's wait, or [] if it cannot wait.

        A stage waits for the tensors of its last layer on the host. This may be any layer, so each
        counts with the least wait of its own class and of all later ones.
        """
        question, pieces = self._question, self._parts[stage].pieces
        there = [one for one in pieces if one.piece.cost.host_saved_bytes]
        if not (there and question.waits_for_host(stage)):
            return []
        least: dict[int, float] = {}
        link = question.host_link_bytes_per_second * unit_seconds
        for one in there:
            wait = one.piece.cost.host_saved_bytes / link
            least[one.piece.number] = min(wait, least.get(one.piece.number, float("inf")))
        (first, _), (_, stop) = question.windows[stage : stage + 2]
        behind = float("inf")
        for number in reversed(question.classes[first:stop]):
            behind = least[number] = min(behind, least.get(number, float("inf")))
        column = self._program.column()
        waits = [(one.column, least[one.piece.number]) for one in there]
        self.add(stage, waits, [(column, -1.0)], 0.0)
        # H ≥ behind · (1 − layers that are not on the host)
        others = [(one.column, -behind) for one in pieces if one not in there]
        self._program.add([(column, -1.0), *others], most=-behind)
        return [column]

    def shorten(self, below: float) -> bool:
        """Lower the most layers of stages as far as all solutions below a limit allow.

        The program must have been solved. Return whether any stage became shorter. From then on,
        the rows hold for solutions below the limit only.
        """
        layers = [float(self._program.values(own.columns).sum()) for own in self._parts]
        guess, is_shorter = 1, False
        for stage, row in enumerate(self._rows):
            length = max(int(layers[stage] + _WHOLE), min(guess, self._most[stage] - 1), 1)
            while length < self._most[stage]:
                if self._program.excludes(row, least=length + 1.0, below=below):
                    self._set(stage, length)
                    is_shorter = True
                    guess = length - 1  # neighbours are about as long
                    break
                length += 1
        return is_shorter

    def _set(self, stage: int, most: int) -> None:
        self._most[stage] = most
        self._program.limit(self._rows[stage], least=1.0, most=float(most))
        for one in self._dependent[stage]:
            self._program.change(one.row, one.columns, one.amounts / most)
