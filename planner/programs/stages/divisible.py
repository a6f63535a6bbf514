"""Bounds the stages by a linear program whose layers are divisible.

Bounds a pipeline as if its layers were divisible: what no cut beats, where ranks share memory.

    layers_are_used_up     Σ_stages Σ_modes x  =  the layers of each class
    stages_are_not_empty   Σ x  ≥  1
    stages_take            t  =  what an action takes  +  Σ seconds · x
    chains_are_no_longer   Σ count · t  ≤  L
    memory_is_kept         Σ (state + held · saved) · x  ≤  the rank's limit, at its full moments

The least L. Rows come one by one: the moment at which a rank holds too much in the optimum; and the
longest chain of the schedule, simulated with what stages take there, until that is hardly longer
than L. Chains hold whatever the stages take, so those that other questions have found come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.orders import ActionKind, Numbers
from autopar.planner.costs.schedules.paths import (
    KINDS,
    TRANSFER,
    Chain,
    Chains,
    first_chains,
    longest_chains,
)
from autopar.planner.costs.schedules.simulation import Floats, StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.bounds import DataBound
from autopar.planner.costs.steps.memory import (
    layer_state_bytes,
    layer_unsharded_bytes,
    most_tensor_bytes,
)
from autopar.planner.programs.solver import GrowingProgram, Term
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


def parts_of(question: StageQuestion, program: GrowingProgram) -> list[list[PieceOnStage]]:
    """Return each stage's possible pieces, with columns; layer i is on stage i or before."""
    last, stages = len(question.classes) - 1, question.shape.stages
    pieces = cache(partial(_pieces, question))
    parts = []
    for stage, kind in enumerate(question.kinds):
        own = dict.fromkeys(question.classes[stage : last + 2 - stages + stage])
        found = (piece for number in own for piece in pieces(kind, number, stage > 0))
        parts.append(
            [PieceOnStage(stage=stage, piece=one, column=program.column()) for one in found]
        )
    return parts


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryRow:
    """Σ bytes · x ≤ remaining memory, as fractions of a rank's limit."""

    columns: Numbers
    shares: Floats
    most: float


class RankMoments:
    """A rank's memory at each of its peaks, per layer of each piece on its stages."""

    def __init__(
        self, question: StageQuestion, rank: int, parts: Sequence[Sequence[PieceOnStage]]
    ) -> None:
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
        """The peak that is largest if all pieces are equally many."""
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
        """Yield the row of the most exceeded moment in the optimum, if any."""
        over = self._held @ program.values(self._columns) - self._most
        worst = int(np.argmax(over))
        if over[worst] > _SLACK and worst not in self._added:
            yield self.row_at(worst)


_MOST_PROGRAMS = 40
_MOST_SIMULATED = 12  # simulations to find new chains
_CLOSE = 2e-3  # of the optimum: a chain that is longer by no more is close enough
_WEIGHTS = KINDS.index(ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The number of layers of each stage, with fractions.

    And a lower bound. Empty: nothing fits.
    """

    lengths: tuple[float, ...]
    bound_seconds: float


class Divisible:
    """The program of one question."""

    def __init__(self, question: StageQuestion, transfers: Sequence[float], chains: Chains) -> None:
        self.question, self.chains = question, chains
        arrangement, groups = question.arrangement, question.groups
        self._data = DataBound(arrangement, groups, question.constants)
        self._action = question.constants.action_seconds
        self.program = GrowingProgram()
        self.parts = parts_of(question, self.program)
        self.unit = self._unit()
        self._sending = min(transfers[:-1], default=0.0) / self.unit
        self._simulated = 0
        self._added: set[object] = set()
        self._layers_are_used_up()
        self._times = np.array(self._stages_take())  # the column of [stage, kind of action]
        self._memories = [
            RankMoments(question, rank, self.parts) for rank in range(question.shape.ranks)
        ]
        self._keep_memory(one.row_at(one.likely) for one in self._memories)

    def solve(
        self, *, enough_seconds: float, time_limit_seconds: float, hasty: bool = False
    ) -> Divided:
        """Return the optimum, or a bound of it that suffices.

        With `hasty`, it stops if the bound rises too slowly to suffice in the end.
        """
        for chain in first_chains(self.question.arrangement.schedule, self.question.shape):
            self._add_chain(chain)
        lengths: tuple[float, ...] = ()
        bound = 0.0
        for _ in range(_MOST_PROGRAMS):
            found = self.program.solve(time_limit_seconds=time_limit_seconds)
            if found is None:
                break
            if found == float("inf"):
                return Divided(lengths=(), bound_seconds=found)
            raised = found * self.unit - bound
            bound = max(bound, found * self.unit)
            lengths = tuple(
                float(self.program.values([part.column for part in own]).sum())
                for own in self.parts
            )
            left = _MOST_SIMULATED - self._simulated
            is_far = hasty and self._simulated and bound + left * raised < enough_seconds
            if bound >= enough_seconds or is_far or not self._tighten():
                break
        return Divided(lengths=lengths, bound_seconds=bound)

    def _tighten(self) -> bool:
        """Add a violated memory row, else a longer chain; returns whether there was any."""
        if self._keep_memory(row for one in self._memories for row in one.exceeded(self.program)):
            return True
        times = np.full((len(self.parts), TRANSFER + 1), self._sending)
        times[:, :TRANSFER] = self.program.values(self._times)
        longest = self._longest(times)
        if longest is None and self._simulated < _MOST_SIMULATED:
            self._find_longest(times)
            longest = self._longest(times)
        return longest is not None and self._add_chain(longest)

    def _longest(self, times: Floats) -> Chain | None:
        """Return the longest known chain, if it is longer than the optimum."""
        lengths = self.chains.lengths(times)
        place = int(np.argmax(lengths))
        known = float(self.program.values([self.program.least])[0]) * (1 + _CLOSE)
        return list(self.chains)[place] if lengths[place] > known else None

    def _find_longest(self, times: Floats) -> None:
        """Simulate the schedule with the optimum's times of stages."""
        question = self.question
        self._simulated += 1
        self.chains.add(
            longest_chains(
                question.arrangement.schedule,
                question.shape,
                [_seconds_of(row) for row in (times[:, :TRANSFER] * self.unit).tolist()],
                transfer_seconds=[self._sending * self.unit] * (question.shape.stages - 1),
                reduction_seconds=[0.0] * question.shape.ranks,
            )
        )

    def _unit(self) -> float:
        """Return a rough step time, so that the program's numbers are near one."""
        question = self.question
        count, share = len(question.classes), question.shape.microbatches / question.shape.ranks
        costs = {id(part.piece): part.piece.cost for own in self.parts for part in own}.values()
        each = max(one.forward_seconds + one.backward_seconds for one in costs)
        return share * count * each or 1.0

    def _layers_are_used_up(self) -> None:
        counts = np.bincount(self.question.classes)
        classes: dict[int, list[Term]] = defaultdict(list)
        for part in (one for own in self.parts for one in own):
            classes[part.piece.number].append((part.column, 1.0))
        for number, terms in classes.items():
            self.program.add(terms, most=float(counts[number]), least=float(counts[number]))
        for own in self.parts:
            self.program.add([(one.column, -1.0) for one in own], most=-1.0)

    def _stages_take(self) -> list[list[int]]:
        splits = SCHEDULES[self.question.arrangement.schedule].splits_backward
        seconds_of = cache(self._piece_seconds)
        table = []
        for stage, own in enumerate(self.parts):
            row = [self.program.column() for _ in range(TRANSFER)]
            columns = np.array([part.column for part in own])
            seconds = np.array([seconds_of(part.piece) for part in own]) / self.unit
            for kind, total in enumerate(row):
                taken = np.flatnonzero(seconds[:, kind])
                is_empty = kind == _WEIGHTS and not (splits and stage)
                action = 0.0 if is_empty else self._action / self.unit
                self.program.add_row(
                    np.append(columns[taken], total),
                    np.append(seconds[taken, kind], -1.0),
                    most=-action,
                    least=-action,
                )
            table.append(row)
        return table

    def _piece_seconds(self, piece: LayerPiece) -> tuple[float, float, float, float]:
        """Return what a layer adds at least to its stage's passes, in a chain's order."""
        cost = piece.cost
        forward = cost.forward_seconds + self._data.each_forward_more(cost)
        backward = cost.backward_seconds + self._data.each_backward_more(cost)
        if not piece.is_split:
            return forward, backward, backward, 0.0
        weights = cost.weight_gradient_seconds + self._data.gradients(cost.gradient_bytes)
        return forward, backward, backward - weights, weights

    def _keep_memory(self, rows: Iterable[MemoryRow]) -> bool:
        """Add memory rows; returns whether there were any."""
        every = list(rows)
        for row in every:
            self.program.add_row(row.columns, row.shares, most=row.most)
        return bool(every)

    def _add_chain(self, chain: Chain) -> bool:
        """Add L ≥ Σ count · t, unless it is known."""
        if chain.key in self._added:
            return False
        self._added.add(chain.key)
        counts = chain.counts[:, :TRANSFER]
        passed = np.nonzero(counts)
        columns = np.append(self._times[passed], self.program.least)
        sent = float(chain.counts[:, TRANSFER].sum()) * self._sending
        self.program.add_row(columns, np.append(counts[passed], -1.0), most=-sent)
        return True


def _seconds_of(times: Sequence[float]) -> StageSeconds:
    forward, backward, inputs, weights = times
    return StageSeconds(
        forward_seconds=forward,
        backward_seconds=backward,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
    )
