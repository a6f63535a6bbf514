"""Bounds all cuts of a pipeline by a linear program whose layers are divisible.

    x    layers of a class in a mode on a stage        t    seconds of a stage's action
    W    working memory of a stage's running layer     G    the gather before the first forward
    R    by how much a stage's gradient reductions     T    the step: the program's objective
         lengthen the step, or each backward           S    what a stage adds after its last action:
    H    a backward's wait for tensors on the host          sums over the tensor axis, and R if only
                                                            the last backward reduces

    layers_are_used_up     Σ_stages Σ_modes x  =  the layers of each class
    stages_are_not_empty   1  ≤  Σ x  ≤  the most layers of a stage
    stages_take            t  =  the host's time for an action  +  Σ seconds · x
                           (a backward: + H, and + R if every backward reduces)
    host_is_waited_for     H  ≥  Σ over layers on the host of wait · x ÷ the most layers of a stage
                           H  ≥  least wait · (1 − layers that are not on the host)
    memory_is_kept         Σ (state + held · saved) · x + W  ≤  the rank's limit  (cut_bounds.py)
    reductions_outlast     R of a stage  ≥  the share of its reduction that slows its last backward
                           R of a stage  ≥  its reduction  −  the backwards of its layers, except
                                            the last layer's, which comes before any reduction
                           S of a stage  =  Σ seconds · x  (+ R, if only the last backward reduces)
    gathers_come_first     G  ≥  the gather of each stage of the rank that starts first
    chains_are_no_longer   Σ count · t  +  Σ S of the rank on which the chain ends  ≤  T − G − O

O is the optimizer's least time. T is minimised. Rows of memory and chains are added when the
optimum violates them: a rank's memory at its worst moment, and the longest chains (paths.py) of the
schedule, simulated with the optimum's times. This ends when no chain is much longer than T − G − O.
A step is never shorter than any of its chains, whatever the stages' times. So chains that were
found for other questions of this schedule (other layouts, other cuts) are tried before it is
simulated again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.costs.schedules.orders import ActionKind
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
from autopar.planner.programs.growing import GrowingProgram, Term
from autopar.planner.programs.stages.cut_bounds import (
    MemoryRow,
    RankMoments,
    parts_of,
    piece_seconds,
)
from autopar.planner.programs.stages.lengths import StageLengths
from autopar.planner.programs.stages.question import StageQuestion

_MOST_PROGRAMS = 200
_MOST_CHAINS = 8  # added at once
_MOST_WHOLE = 12  # programs of whole numbers
_MOST_ROUNDS = 12  # in which stages become shorter
_SIMULATED = 4  # simulations in each of these rounds
_CLOSE = 2e-3  # of the optimum: a chain that is longer by less is not added
_ROUNDING = 1e-9
_WEIGHTS = KINDS.index(ActionKind.WEIGHT_GRADIENT)
_BACKWARDS = [KINDS.index(one) for one in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedLayers:
    """The number of layers of each stage, with fractions, and a lower bound.

    `lengths` is empty if nothing fits, or nothing was found.
    """

    lengths: tuple[float, ...]
    bound_seconds: float


class Divisible:
    """The linear program for one stage question, in which layers are divisible."""

    def __init__(
        self,
        question: StageQuestion,
        transfers: Sequence[float],
        chains: Chains,
        *,
        longest: int,
    ) -> None:
        self.question, self.chains = question, chains
        arrangement, groups = question.arrangement, question.groups
        self._data = DataBound(arrangement, groups, question.constants)
        self._action = question.constants.action_seconds
        layers = [question.layer(question.kinds[0], number) for number in question.classes]
        plain = [modes[Recompute.NONE] for modes in layers]
        self._layers, self._bucket = plain, max(question.bucket_bytes)
        self._replicated = sum(one.replicated_gradient_bytes for one in plain)
        self.program = GrowingProgram()
        self.parts = parts_of(question, self.program, longest)
        self.unit = self._unit()
        self._updating = self._data.updating(sum(one.trainable for one in plain)) / self.unit
        self._sending = min(transfers[:-1], default=0.0) / self.unit
        self._left = 0  # simulations that may still run
        self._is_whole = False
        self._added: set[object] = set()
        self._layers_are_used_up()
        self._stage_lengths = StageLengths(question, self.program, self.parts)
        self._reduced_by = [self.program.column() for _ in self.parts]
        self._times = np.array(self._stages_take())  # the column of [stage, kind of action]
        self._ends = self._reductions_outlast()  # the column S of each stage
        self._gather = self._gathers_come_first()
        self._memories = [
            RankMoments(question, rank, self.parts, self._stage_lengths.add_work)
            for rank in range(question.shape.ranks)
        ]
        self._keep_memory(one.row_at(one.likely) for one in self._memories)

    def solve(
        self, *, enough_seconds: float, most_simulated: int, hasty: bool = False
    ) -> DividedLayers:
        """Return the optimum, or a lower bound of at least `enough_seconds`.

        With `hasty`, it stops if the bound rises too slowly to reach that.
        """
        for chain in first_chains(self.question.arrangement.schedule, self.question.shape):
            self._add_chain(chain)
        self._left = most_simulated
        lengths: tuple[float, ...] = ()
        bound = 0.0
        for _ in range(_MOST_PROGRAMS):
            found = self.program.solve(enough=enough_seconds * (1 + _ROUNDING) / self.unit)
            if found is None:
                break
            if found == float("inf"):
                return DividedLayers(lengths=(), bound_seconds=found)
            raised = found * self.unit - bound
            bound = max(bound, found * self.unit)
            if bound >= enough_seconds:
                break  # the solver stopped once the bound sufficed, so there is no optimum to read
            lengths = self._lengths()
            is_begun = self._left < most_simulated
            is_far = hasty and is_begun and bound + self._left * raised < enough_seconds
            if is_far or not self._tighten():
                break
        return DividedLayers(lengths=lengths, bound_seconds=bound)

    def solve_whole(self, *, below_seconds: float) -> DividedLayers:
        """Return a lower bound with whole numbers of layers on each rank.

        It is at most `below_seconds`: the program looks only for cuts below that.
        """
        self._numbers_are_whole()
        self._left = _MOST_WHOLE
        lengths: tuple[float, ...] = ()
        bound = 0.0
        for _ in range(_MOST_WHOLE):
            found = self.program.solve_whole(below=below_seconds / self.unit)
            bound = max(bound, found.bound * self.unit)
            if not found.are_found:
                break
            lengths = self._lengths()
            if not self._tighten():
                break
        return DividedLayers(lengths=lengths, bound_seconds=min(bound, below_seconds))

    def with_short_stages(self, *, below_seconds: float) -> float:
        """Return a lower bound of at most `below_seconds`; the program cannot be used afterwards.

        lengths.py finds the most layers of each stage in any cut that is faster than
        `below_seconds`. The bound is the optimum within these limits.
        """
        bound, below = 0.0, below_seconds / self.unit
        for _ in range(_MOST_ROUNDS):
            found = self.solve(enough_seconds=below_seconds, most_simulated=_SIMULATED)
            bound = max(bound, found.bound_seconds)
            is_solved = bool(found.lengths) and bound < below_seconds
            if not (is_solved and self._stage_lengths.shorten(below)):
                break
        return min(bound, below_seconds)

    def _lengths(self) -> tuple[float, ...]:
        return tuple(float(self.program.values(own.columns).sum()) for own in self.parts)

    def _numbers_are_whole(self) -> None:
        """Make the layers of each class in each mode on a rank whole numbers.

        Also, a stage splits the backwards of all of its layers, or of none.
        """
        if self._is_whole:
            return
        self._is_whole = True
        for stages in self.question.stages_of:
            by_mode: dict[int, list[Term]] = defaultdict(list)
            for one in (one for stage in stages for one in self.parts[stage].pieces):
                by_mode[id(one.piece.cost)].append((one.column, 1.0))
            for terms in by_mode.values():
                number = self.program.column()
                self.program.whole([number])
                self.program.add([*terms, (number, -1.0)], most=0.0, least=0.0)
        for own in self.parts:
            split = [(one.column, 1.0) for one in own.pieces if one.piece.is_split]
            others = [(one.column, 1.0) for one in own.pieces if not one.piece.is_split]
            if split and others:
                splits, most = self.program.column(), float(own.most_layers)
                self.program.whole([splits])
                self.program.add([(splits, 1.0)], most=1.0)
                self.program.add([*split, (splits, -most)], most=0.0)
                self.program.add([*others, (splits, most)], most=most)

    def _tighten(self) -> bool:
        """Add memory rows that the optimum violates, or else chains; return whether any are new."""
        if self._keep_memory(row for one in self._memories for row in one.exceeded(self.program)):
            return True
        times = np.full((len(self.parts), TRANSFER + 1), self._sending)
        times[:, :TRANSFER] = self.program.values(self._times)
        longest = self._longest(times)
        if not longest and self._left:
            self._find_longest(times)
            longest = self._longest(times)
        added = [self._add_chain(one) for one in longest]
        return any(added)

    def _longest(self, times: Floats) -> list[Chain]:
        """Return the longest known chains that are longer than the optimum's T − G − O."""
        lengths = self.chains.lengths(times, self._reduced())
        least, gather = self.program.values([self.program.least, self._gather]).tolist()
        places = np.argsort(-lengths, kind="stable")[:_MOST_CHAINS]
        is_longer = lengths[places] > least * (1 + _CLOSE) - gather - self._updating
        every = list(self.chains)
        return [every[place] for place in places[is_longer].tolist()]

    def _find_longest(self, times: Floats) -> None:
        """Simulate the schedule with the optimum's times; add its longest chains to those known."""
        question = self.question
        self._left -= 1
        self.chains.add(
            longest_chains(
                question.arrangement.schedule,
                question.shape,
                [StageSeconds(*row) for row in (times[:, :TRANSFER] * self.unit).tolist()],
                transfer_seconds=[self._sending * self.unit] * (question.shape.stages - 1),
                reduction_seconds=(self._reduced() * self.unit).tolist(),
            )
        )

    def _reduced(self) -> Floats:
        """Return by how much the reductions of each rank lengthen its step in the optimum."""
        found = self.program.values(self._ends)
        return np.array([found[list(stages)].sum() for stages in self.question.stages_of])

    def _unit(self) -> float:
        """Return a rough step time, so that the program's numbers are near one."""
        question = self.question
        count, share = len(question.classes), question.shape.microbatches / question.shape.ranks
        pieces = {id(part.piece): part.piece for own in self.parts for part in own.pieces}
        costs = [one.cost for one in pieces.values()]
        each = max(one.forward_seconds + one.backward_seconds for one in costs)
        return share * count * each or 1.0

    def _layers_are_used_up(self) -> None:
        """Add layers_are_used_up."""
        counts = np.bincount(self.question.classes)
        classes: dict[int, list[Term]] = defaultdict(list)
        for part in (one for own in self.parts for one in own.pieces):
            classes[part.piece.number].append((part.column, 1.0))
        for number, terms in classes.items():
            self.program.add(terms, most=float(counts[number]), least=float(counts[number]))

    def _stages_take(self) -> list[list[int]]:
        """Add stages_take; return the column of each stage and kind of action."""
        splits = SCHEDULES[self.question.arrangement.schedule].splits_backward
        each = self.question.arrangement.reduces_each
        seconds_of = cache(partial(piece_seconds, self._data))
        table = []
        for stage, own in enumerate(self.parts):
            row = [self.program.column() for _ in range(TRANSFER)]
            columns = np.array(own.columns)
            seconds = np.array([seconds_of(part.piece) for part in own.pieces]) / self.unit
            waited = [
                *self._stage_lengths.add_waits(stage, self.unit),
                *([self._reduced_by[stage]] * each),
            ]
            for kind, total in enumerate(row):
                taken = np.flatnonzero(seconds[:, kind])
                waits = waited if kind in _BACKWARDS else []
                is_empty = kind == _WEIGHTS and not (splits and stage)
                action = 0.0 if is_empty else self._action / self.unit
                self.program.add_row(
                    np.array([*columns[taken], *waits, total]),
                    np.array([*seconds[taken, kind], *(1.0 for _ in waits), -1.0]),
                    most=-action,
                    least=-action,
                )
            table.append(row)
        return table

    def _reductions_outlast(self) -> list[int]:
        """Add reductions_outlast; return the column S of each stage.

        A reduction slows the backward beside it, and may take longer than this backward. Nothing is
        computed beside the reduction of a stage's first layer, whose gradients are the last ones.
        Nothing is reduced before the backward of its last layer has made the first ones.
        """
        arrangement, found = self.question.arrangement, []
        slowing = self._data.slowing if arrangement.averaging_ranks > 1 else 0.0
        for stage, own in enumerate(self.parts):
            column, end = self._reduced_by[stage], self.program.column()
            found.append(end)
            (first, latest), (soonest, stop) = self.question.windows[stage : stage + 2]
            sizes = [one.gradient_bytes for one in self._layers[first:stop]]
            most = self._data.most_reduced(sizes, self._bucket)
            seconds = {
                one.column: self._data.each_reduction(one.piece.cost.gradient_bytes, most)
                / self.unit
                for one in own.pieces
            }
            starts = dict.fromkeys(self.question.classes[first : latest + 1])
            ends = dict.fromkeys(self.question.classes[soonest - 1 : stop])
            alone = (1.0 - slowing) * min(
                self._data.last_reduction(one.piece.cost.gradient_bytes)
                for one in own.pieces
                if one.piece.number in starts
            )
            before = min(
                one.piece.cost.backward_seconds for one in own.pieces if one.piece.number in ends
            )
            slowed = [(place, slowing * each) for place, each in seconds.items()]
            outlasting = [
                (one.column, seconds[one.column] - one.piece.cost.backward_seconds / self.unit)
                for one in own.pieces
            ]
            self.program.add([(column, -1.0), *slowed], most=-alone / self.unit)
            self.program.add([(column, -1.0), *outlasting], most=-before / self.unit)
            sums = [(one.column, self._sum(one.piece.cost)) for one in own.pieces]
            last = [] if arrangement.reduces_each else [(column, 1.0)]
            self.program.add([(end, -1.0), *last, *sums], most=0.0, least=0.0)
        return found

    def _sum(self, cost: LayerCost) -> float:
        return self._data.each_sum(cost.replicated_gradient_bytes, self._replicated) / self.unit

    def _gathers_come_first(self) -> int:
        """Add gathers_come_first; return the column G.

        The rank that starts first waits for the parameters of each of its stages.
        """
        gather = self.program.column()
        for stage in self.question.stages_of[self.question.ranks[0]]:
            terms = [(gather, -1.0)]
            (first, _), (_, stop) = self.question.windows[stage : stage + 2]
            sizes = [one.parameter_bytes for one in self._layers[first:stop]]
            most = self._data.most_gathered(sizes, self._bucket)
            for one in self.parts[stage].pieces:
                gathered = self._data.each_first_gather(one.piece.cost.parameter_bytes, most)
                terms.append((one.column, gathered / self.unit))
            self.program.add(terms, most=0.0)
        return gather

    def _keep_memory(self, rows: Iterable[MemoryRow]) -> bool:
        """Add memory_is_kept for these rows; return whether there were any."""
        every = list(rows)
        for row in every:
            self.program.add_row(row.columns, row.shares, most=row.most)
        return bool(every)

    def _add_chain(self, chain: Chain) -> bool:
        """Add chains_are_no_longer for a chain; return False if the program has it already."""
        if chain.key in self._added:
            return False
        self._added.add(chain.key)
        counts = chain.counts[:, :TRANSFER]
        passed = np.nonzero(counts)
        ended = [] if chain.rank is None else self.question.stages_of[chain.rank]
        reductions = [self._ends[stage] for stage in ended]
        columns = [*self._times[passed], *reductions, self._gather, self.program.least]
        factors = [*counts[passed], *[1.0] * len(reductions), 1.0, -1.0]
        sent = float(chain.counts[:, TRANSFER].sum()) * self._sending
        least = -sent - self._updating
        self.program.add_row(np.array(columns), np.array(factors), most=least)
        return True
