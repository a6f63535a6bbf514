"""Bounds what a node of the search can come to, from the layouts that are solved by then."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.annotate import state_of
from autopar.planner.cluster.blocks import Kind, Share
from autopar.planner.costs.prediction import Arrangement, Modes, Zero
from autopar.planner.costs.steps.backward_memory import layer_unsharded_bytes
from autopar.planner.costs.steps.memory import layer_state_bytes
from autopar.planner.costs.steps.rank_groups import rank_groups
from autopar.planner.plan.bounds.bottleneck import (
    Block,
    Places,
    Room,
    StageRoom,
    least_bottleneck_seconds,
    places,
)
from autopar.planner.plan.bounds.layout_facts import LayoutFacts, facts_of, of_any
from autopar.planner.plan.bounds.least import LeastLayers, least_layers
from autopar.planner.plan.bounds.relaxed_memory import (
    activation_budget_bytes,
    in_flight_by_rank,
    least_recompute_seconds,
    lightest,
)
from autopar.planner.plan.bounds.step import Pressed, StepBound
from autopar.planner.plan.declared.constraints import Objective
from autopar.planner.plan.solving.costing import Inside
from autopar.planner.plan.solving.questions import Questions, inside_of

Kinds = tuple[Kind, ...]  # of pipeline ranks that differ
Rooms = tuple[tuple[StageRoom, ...], ...]  # of the stages of each rank

_ENDLESS: Rooms = ((StageRoom(in_flight=1, size_bytes=1e30),),)
_NEVER = Pressed(
    recompute_seconds=float("inf"), bottleneck_seconds=float("inf"), places=Places(ranks=())
)


class Bounds:
    """What no leaf below a node beats, under one objective."""

    def __init__(self, questions: Questions, objective: Objective) -> None:
        self.questions, self.costing, self.objective = questions, questions.costing, objective
        subject = self.costing.subject
        self.held = state_of(subject.graph.parameters, self.costing.precision)
        self._least: dict[tuple[int, Share], LeastLayers] = {}
        self._facts: dict[tuple[Inside, Kinds], LayoutFacts] = {}
        self._of_any: dict[tuple[Inside, Kinds], LayoutFacts] = {}
        self._bottlenecks: dict[tuple[Block, Room], float] = {}

    def of_point(self, point: Arrangement) -> float:
        """Return what no variant of a point beats, whatever the layouts."""
        if self.objective is Objective.MEMORY:
            return float(self.least_memory(replace(point, zero=Zero.PARAMETERS)))
        least = [
            [self.least_on(point.tensor, one) for one in own] for own in self.questions.kinds(point)
        ]
        slowest = min(max(one.bottleneck_seconds(point.pipeline) for one in own) for own in least)
        through = min(max(one.through_seconds for one in own) for own in least)
        return max(through, point.microbatches * slowest)

    def least_on(self, tensor: int, share: Share) -> LeastLayers:
        """Return what the layers take at least on a device, for its rows."""
        key = tensor, share
        if key not in self._least:
            self._least[key] = least_layers(
                self.costing.pricer(share.rows, share.device),
                self.costing.subject.layers,
                tensor=tensor,
                rules=self.costing.rules,
            )
        return self._least[key]

    def without_memory(self, arrangement: Arrangement) -> float:
        """Return what no choice of stages and layouts beats, had every rank endless memory."""
        if self.objective is Objective.MEMORY:
            return float(self.least_memory(arrangement))
        return self._bound(arrangement, self.of_any(arrangement), None)

    def within_memory(self, arrangement: Arrangement) -> float:
        """Return what no choice beats, whatever the layouts; infinite where none can fit."""
        rooms = self._rooms(arrangement)
        best = self._bound(arrangement, self.of_any(arrangement), rooms)
        return self._of_objective(arrangement, best)

    def of_variant(self, arrangement: Arrangement) -> float:
        """Return what no choice of stages beats in the layouts there are; infinite: none fits."""
        facts = self.facts(arrangement, 0)
        best = self.of_solution(arrangement, 0)
        # The fastest layouts are so for what they compute, not for what ZeRO-2 and 3 send of them.
        is_sent = arrangement.zero >= Zero.GRADIENTS and arrangement.tensor > 1
        if is_sent or best > self._bound(arrangement, facts, None):
            solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
            others = range(1, len(solutions))
            best = min([best, *(self.of_solution(arrangement, number) for number in others)])
        else:  # memory does not press here, but may where stages are whole
            best = min(best, self.without_memory(arrangement))
        return self._of_objective(arrangement, best)

    def of_solution(self, arrangement: Arrangement, solution: int) -> float:
        """Return what no choice of stages beats in one of the layouts; infinite: none fits."""
        rooms = self._rooms(arrangement)
        return self._bound(arrangement, self.facts(arrangement, solution), rooms)

    def _of_objective(self, arrangement: Arrangement, least_seconds: float) -> float:
        """Return what the objective makes of it, infinite as it may be."""
        if self.objective is Objective.MEMORY and least_seconds < float("inf"):
            return float(self.least_memory(arrangement))
        return least_seconds

    def _bound(self, arrangement: Arrangement, facts: LayoutFacts, rooms: Rooms | None) -> float:
        """Return the bound of a step in some layouts, within the memory or, None, without it."""
        constants = self.questions.constants
        groups = rank_groups(self.costing.cluster_of(arrangement), arrangement)
        step = StepBound(arrangement, groups, constants, facts.totals)
        pressed = self._pressed(arrangement, facts, step.shared(facts.block), rooms)
        return float("inf") if pressed is _NEVER else step.seconds(pressed, facts.block)

    def _pressed(
        self, arrangement: Arrangement, facts: LayoutFacts, shared: Block, rooms: Rooms | None
    ) -> Pressed:
        """Return the least time of recomputing and of the slowest rank, within the memory or not.

        The one stage of no pipeline has the transient memory of every layer in it.
        """
        again, margin = 0.0, self.questions.constants.margin
        if rooms is not None:
            size = self.questions.most_bytes(arrangement)
            if facts.least_alone_bytes(arrangement) * (1.0 + margin) > size:
                return _NEVER
            budget = activation_budget_bytes(
                arrangement,
                rank_bytes=size / (1.0 + margin) - facts.transient_bytes(arrangement),
                state_bytes=facts.state_bytes(arrangement),
            )
            again = least_recompute_seconds(facts.ladder, budget)
        room = self._room(arrangement, facts, rooms or _ENDLESS * arrangement.pipeline)
        slowest = self._bottleneck(shared, room)
        if max(again, slowest) == float("inf"):
            return _NEVER
        return Pressed(
            recompute_seconds=again, bottleneck_seconds=slowest, places=places(shared, room)
        )

    def _room(self, arrangement: Arrangement, facts: LayoutFacts, ranks: Rooms) -> Room:
        return Room(
            ranks=ranks,
            state_bytes=layer_state_bytes(facts.repeated, arrangement),
            unsharded_bytes=layer_unsharded_bytes(facts.repeated, arrangement),
            transient_bytes=facts.transient_bytes(arrangement),
            margin=self.questions.constants.margin,
            is_one_pass=arrangement.is_one_pass,
        )

    def _rooms(self, arrangement: Arrangement) -> Rooms:
        """Return the memory of each rank as if all its stages were the one that holds least."""
        sizes = self.questions.room_bytes(arrangement)
        return tuple(
            (StageRoom(in_flight=one, size_bytes=size),)
            for one, size in zip(in_flight_by_rank(arrangement), sizes, strict=True)
        )

    def _bottleneck(self, shared: Block, room: Room) -> float:
        key = shared, room
        if key not in self._bottlenecks:
            self._bottlenecks[key] = least_bottleneck_seconds(shared, room)
        return self._bottlenecks[key]

    def least_state(self, arrangement: Arrangement) -> int:
        """Return the bytes of all parameters' state, split evenly over the tensor axis."""
        held, shard, zero = self.held, arrangement.shard, arrangement.zero
        # Of 16 bits the optimizer's copies are the parameters of ZeRO-3, and those of ZeRO-2 too
        # when gradients are there and a step is one pass, which has freed what was gathered.
        is_gathered = zero is Zero.GRADIENTS and not arrangement.is_one_pass
        return (
            (held.parameter_bytes if zero < Zero.GRADIENTS or is_gathered else 0)
            + held.gradient_bytes // (shard if zero >= Zero.GRADIENTS else 1)
            + held.optimizer_bytes // (shard if zero >= Zero.OPTIMIZER else 1)
        ) // arrangement.tensor

    def least_memory(self, arrangement: Arrangement) -> int:
        """Return what the fullest rank of an arrangement holds at least."""
        held = self.least_state(arrangement) // arrangement.pipeline
        return self.questions.constants.context_bytes + held

    def facts(self, arrangement: Arrangement, solution: int) -> LayoutFacts:
        """Return what the bounds need to know of one layout solution, at its least anywhere."""
        key = inside_of(arrangement, solution), self.questions.kinds(arrangement)
        if key not in self._facts:
            self._facts[key] = facts_of(self._row(*key))
        return self._facts[key]

    def of_any(self, arrangement: Arrangement) -> LayoutFacts:
        """Return what no layout solution has less of, at its least anywhere."""
        degree, fastest = arrangement.tensor, inside_of(arrangement, 0)
        if degree == 1:
            return self.facts(arrangement, 0)
        key = fastest, self.questions.kinds(arrangement)
        if key not in self._of_any:
            unsplit = self._row(replace(fastest, tensor=1), key[1])
            row = of_any(self._row(*key), unsplit, degree=degree)
            self._of_any[key] = facts_of(row)
        return self._of_any[key]

    def _row(self, inside: Inside, kinds: Kinds) -> tuple[Modes, ...]:
        return lightest([self.costing.slowest_rows(inside, own) for own in kinds])
