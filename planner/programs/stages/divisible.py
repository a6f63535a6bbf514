"""Bounds a pipeline as if its layers were divisible: what no cut beats, where ranks share memory.

    layers_are_used_up     Σ_stages Σ_modes x  =  the layers of each class
    stages_are_not_empty   Σ x  ≥  1
    stages_take            t  =  what an action takes  +  Σ seconds · x
    chains_are_no_longer   Σ count · t  ≤  L
    memory_is_kept         Σ (state + held · saved) · x  ≤  the rank's limit, at its full moments

The least L. Chains come one by one: the schedule is simulated with what stages take in the
optimum, and its longest chain becomes a row, until that is hardly longer than L. Chains hold
whatever the stages take, so those that other questions have found come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.costs.prediction import LayerCost
from autopar.planner.costs.schedules.actions import ActionKind
from autopar.planner.costs.schedules.paths import (
    KINDS,
    TRANSFER,
    Chain,
    Floats,
    chains_of,
    first_chains,
    longest_chains,
)
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.data_bound import DataBound
from autopar.planner.costs.steps.memory import (
    layer_state_bytes,
    layer_unsharded_bytes,
    most_tensor_bytes,
)
from autopar.planner.programs.growing import GrowingProgram, Term
from autopar.planner.programs.stages.question import StageQuestion
from autopar.planner.programs.stages.rank_memory import fullest

_MOST_PROGRAMS = 40
_MOST_SIMULATED = 12  # to find chains that no other question has found
_CLOSE = 2e-3  # of the optimum: a chain that is longer by no more is as good as there
_SLACK = 1e-6  # of a rank's memory: what is rounded up
_WEIGHTS = KINDS.index(ActionKind.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """How many layers each stage has, in parts; what no cut beats. No lengths: nothing fits."""

    lengths: tuple[float, ...]
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """Layers of a class on a stage, in one mode; `is_split`: with their backward in two halves."""

    stage: int
    number: int
    cost: LayerCost
    is_split: bool
    column: int


class Divisible:
    """The program of one question."""

    def __init__(self, question: StageQuestion, transfers: Sequence[float]) -> None:
        self.question = question
        arrangement, groups = question.arrangement, question.groups
        self._data = DataBound(arrangement, groups, question.constants)
        self._action = question.constants.action_on(arrangement)
        self.program = GrowingProgram()
        self.parts = [list(self._parts(stage)) for stage in range(question.shape.stages)]
        self.unit = self._unit()
        self._sending = min(transfers[:-1], default=0.0) / self.unit
        self.chains = chains_of(arrangement.schedule, question.shape)
        self._simulated = 0
        self._added: set[object] = set()
        self._layers_are_used_up()
        self.times = self._stages_take()
        self._memory_is_kept()

    def solve(
        self, *, enough_seconds: float, time_limit_seconds: float, hasty: bool = False
    ) -> Divided:
        """Return the optimum, or a bound of it that is enough.

        In haste, it ends where the bound rises too slowly to be enough in the end.
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
        """Add a chain that is longer in the optimum than was known; whether there is one."""
        times = np.array([[*self.program.values(row), self._sending] for row in self.times])
        longest = self._longest(times)
        if longest is None and self._simulated < _MOST_SIMULATED:
            self._find_longest(times)
            longest = self._longest(times)
        return longest is not None and self._add_chain(longest)

    def _longest(self, times: Floats) -> Chain | None:
        """Return the longest of the chains that are known, if it is longer than the optimum."""
        lengths = self.chains.lengths(times)
        place = int(np.argmax(lengths))
        known = float(self.program.values([self.program.least])[0]) * (1 + _CLOSE)
        return list(self.chains)[place] if lengths[place] > known else None

    def _find_longest(self, times: Floats) -> None:
        """Simulate the schedule with what stages take in the optimum."""
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

    def _parts(self, stage: int) -> Iterator[_Part]:
        """Yield the layers that a stage may have: layer i is on no later stage than i."""
        question = self.question
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
                halves = (True, False) if splits and not cost.recompute_seconds else (False,)
                for is_split in halves:
                    yield _Part(
                        stage=stage,
                        number=number,
                        cost=cost,
                        is_split=is_split,
                        column=self.program.column(),
                    )

    @property
    def _every(self) -> Iterator[_Part]:
        return (one for own in self.parts for one in own)

    def _unit(self) -> float:
        """Return about what a step takes, so that the numbers of the program are near one."""
        question = self.question
        count, share = len(question.classes), question.shape.microbatches / question.shape.ranks
        each = max(one.cost.forward_seconds + one.cost.backward_seconds for one in self._every)
        return share * count * each or 1.0

    def _layers_are_used_up(self) -> None:
        counts = np.bincount(self.question.classes)
        classes: dict[int, list[Term]] = defaultdict(list)
        for one in self._every:
            classes[one.number].append((one.column, 1.0))
        for number, terms in classes.items():
            self.program.add(terms, most=float(counts[number]), least=float(counts[number]))
        for own in self.parts:
            self.program.add([(one.column, -1.0) for one in own], most=-1.0)

    def _stages_take(self) -> list[list[int]]:
        splits = SCHEDULES[self.question.arrangement.schedule].splits_backward
        table = []
        for stage, own in enumerate(self.parts):
            row = [self.program.column() for _ in range(TRANSFER)]
            seconds = [(one, self._layer_seconds(one)) for one in own]
            for kind, total in enumerate(row):
                terms = [(one.column, own[kind] / self.unit) for one, own in seconds]
                is_empty = kind == _WEIGHTS and not (splits and stage)
                action = 0.0 if is_empty else self._action / self.unit
                self.program.add([*terms, (total, -1.0)], most=-action, least=-action)
            table.append(row)
        return table

    def _layer_seconds(self, part: _Part) -> tuple[float, float, float, float]:
        """Return what a layer adds to its stage's passes, at least: as chains count them."""
        cost = part.cost
        forward = cost.forward_seconds + self._data.each_forward_more(cost)
        backward = cost.backward_seconds + self._data.each_backward_more(cost)
        if not part.is_split:
            return forward, backward, backward, 0.0
        weights = cost.weight_gradient_seconds
        inputs = backward - weights + cost.split_input_seconds
        return forward, backward, inputs, weights + cost.split_weight_seconds

    def _memory_is_kept(self) -> None:
        question = self.question
        for rank, stages in enumerate(question.stages_of):
            limit = most_tensor_bytes(
                question.limit_bytes[rank], question.arrangement, question.constants
            )
            moments = question.moments[rank]
            for moment in fullest(moments):
                running = stages[int(moments.running[moment])]
                needed = min(self._work_bytes(one.cost) for one in self.parts[running])
                terms = []
                for place, stage in enumerate(stages):
                    held = (
                        int(moments.forwarded[moment, place]),
                        int(moments.halfway[moment, place]),
                        int(moments.unanswered[moment, place]),
                    )
                    for one in self.parts[stage]:
                        size = layer_state_bytes(one.cost, question.arrangement)
                        size += self._held_bytes(one, *held)
                        terms.append((one.column, size / limit))
                self.program.add(terms, most=1.0 - needed / limit + _SLACK)

    def _held_bytes(self, part: _Part, forwarded: int, halfway: int, unanswered: int) -> int:
        if part.is_split:
            return part.cost.saved_bytes * forwarded + part.cost.deferred_bytes * halfway
        return part.cost.saved_bytes * unanswered

    def _work_bytes(self, cost: LayerCost) -> int:
        return cost.transient_bytes + layer_unsharded_bytes(cost, self.question.arrangement)

    def _add_chain(self, chain: Chain) -> bool:
        """Add L ≥ Σ count · t, unless it is known."""
        if chain.key in self._added:
            return False
        self._added.add(chain.key)
        terms = [(self.program.least, -1.0)]
        for row, counts in zip(self.times, chain.counts, strict=True):
            terms += [
                (total, float(count)) for total, count in zip(row, counts, strict=False) if count
            ]
        sent = float(chain.counts[:, TRANSFER].sum()) * self._sending
        self.program.add(terms, most=-sent)
        return True


def _seconds_of(times: Sequence[float]) -> StageSeconds:
    forward, backward, inputs, weights = times
    return StageSeconds(
        forward_seconds=forward,
        backward_seconds=backward,
        input_gradient_seconds=inputs,
        weight_gradient_seconds=weights,
    )
