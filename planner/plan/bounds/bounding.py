"""Bounds a node of the search, from the layouts that have been solved so far.

The bounds use facts about layouts inside layers: those of one layout solution, or lower limits over
all layout solutions. A layer takes at least the time of its fastest layouts. Before these are
solved, it takes at least the time of its ops, each in its own fastest split. What a rank holds,
sends, updates and recomputes is at least the unsplit layer's amount ÷ the number of tensor ranks.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import product

from autopar.planner.annotate import state_of
from autopar.planner.cluster.shape import Kind, RowShare
from autopar.planner.costs.prediction import (
    Arrangement,
    Modes,
    Offload,
    Zero,
)
from autopar.planner.costs.steps.memory import layer_unsharded_bytes
from autopar.planner.costs.steps.stage_load import rank_groups
from autopar.planner.costs.steps.state import reduced_state_bytes, state_bytes
from autopar.planner.layers import Compile
from autopar.planner.plan.bounds.bottleneck import (
    LayerBlock,
    PipelineRoom,
    RankCapacities,
    StageRoom,
    least_bottleneck_seconds,
    rank_capacities,
)
from autopar.planner.plan.bounds.least import (
    LeastLayers,
    activation_budget_bytes,
    in_flight_by_rank,
    least_classes,
    least_layers,
    least_of_all,
    least_recompute_seconds,
    lightest,
    of_any,
    of_least,
)
from autopar.planner.plan.bounds.step import FittingBounds, LayoutFacts, StepBound, facts_of
from autopar.planner.plan.declared.constraints import Objective
from autopar.planner.plan.solving.candidate import Questions, layer_key
from autopar.planner.plan.solving.prices import LayerKey, LeastKey

RankKinds = tuple[Kind, ...]  # distinct kinds of pipeline ranks
Rooms = tuple[tuple[StageRoom, ...], ...]  # of each rank, by stage

_ENDLESS: Rooms = ((StageRoom(in_flight=1, size_bytes=1e30),),)
_NEVER = FittingBounds(
    recompute_seconds=float("inf"),
    bottleneck_seconds=float("inf"),
    capacities=lambda: RankCapacities(ranks=()),
)


class BoundKind(IntEnum):
    """How a variant's bound accounts for memory; each kind is sharper and slower than the last."""

    UNSOLVED = 0  # the least time and memory of any layouts, before any are solved
    OF_ANY = 1  # the time of the fastest layouts, and the least memory of any
    OF_LAYOUTS = 2  # time and memory of the solved layouts


class Bounds:
    """Lower bounds of the step of all plans below a node of the search."""

    def __init__(self, questions: Questions) -> None:
        self.questions, self.costing = questions, questions.costing
        self._least: dict[tuple[int, Compile, RowShare], LeastLayers] = {}
        self._facts: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._of_any: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._of_least: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._bottlenecks: dict[tuple[LayerBlock, PipelineRoom], float] = {}

    def of_point(self, point: Arrangement) -> float:
        """Return a lower bound of all variants of a point, in any layouts."""
        least = [[self.least_on(point, one) for one in own] for own in self.questions.kinds(point)]
        slowest = min(max(one.bottleneck_seconds(point.pipeline) for one in own) for own in least)
        through = min(max(one.through_seconds for one in own) for own in least)
        return max(through, point.microbatches * slowest)

    def least_on(self, point: Arrangement, share: RowShare) -> LeastLayers:
        """Return the least times of the layers on a device, for its rows of a microbatch."""
        key = point.tensor, point.compile, share
        if key not in self._least:
            costing, layers = self.costing, self.costing.subject.layers
            priced = LeastKey(device=share.device, compile=point.compile, rules=costing.rules)
            known, place = costing.prices.least(priced), (point.tensor, share.rows)
            if place not in known:
                known[place] = least_classes(
                    costing.pricer(share, point.compile),
                    layers,
                    tensor=point.tensor,
                    rules=costing.rules,
                    ways=costing.prices.ways,
                )
            self._least[key] = least_layers(known[place], layers)
        return self._least[key]

    def of_kind(self, kind: BoundKind, arrangement: Arrangement) -> float:
        """Return a lower bound of an arrangement; infinite if nothing fits into the memory."""
        bound_of = {
            BoundKind.UNSOLVED: self.unsolved,
            BoundKind.OF_ANY: self.within_memory,
            BoundKind.OF_LAYOUTS: self.of_variant,
        }[kind]
        return bound_of(arrangement)

    def unsolved(self, arrangement: Arrangement) -> float:
        """Return a lower bound within the memory, before any layouts are solved."""
        rooms = self._rooms(arrangement)
        return self._bound(arrangement, self.of_least(arrangement), rooms)

    def without_memory(self, arrangement: Arrangement) -> float:
        """Return a lower bound without memory limits."""
        return self._bound(arrangement, self.of_any(arrangement), None)

    def within_memory(self, arrangement: Arrangement) -> float:
        """Return a lower bound within the memory, in any layouts; infinite if nothing fits."""
        rooms = self._rooms(arrangement)
        return self._bound(arrangement, self.of_any(arrangement), rooms)

    def of_variant(self, arrangement: Arrangement) -> float:
        """Return a lower bound in the solved layouts; infinite if nothing fits."""
        facts = self.facts(arrangement, 0)
        best = self.of_solution(arrangement, 0)
        # If every backward sends gradients, layouts that are not the fastest inside the layers may
        # be the fastest together with these messages.
        is_sent = arrangement.reduces_each and arrangement.tensor > 1
        if is_sent or best > self._bound(arrangement, facts, None):
            solutions = self.costing.solutions(arrangement)
            others = range(1, len(solutions))
            best = min([best, *(self.of_solution(arrangement, number) for number in others)])
        else:  # all layers together fit into the memory, but whole stages may not
            best = min(best, self.without_memory(arrangement))
        return best

    def of_solution(self, arrangement: Arrangement, solution: int) -> float:
        """Return a lower bound in the layouts of one solution; infinite if nothing fits."""
        rooms = self._rooms(arrangement)
        return self._bound(arrangement, self.facts(arrangement, solution), rooms)

    def _bound(self, arrangement: Arrangement, facts: LayoutFacts, rooms: Rooms | None) -> float:
        """Return the lower bound of a step in some layouts.

        `rooms` is the memory of the ranks, or None for no memory limit.
        """
        constants = self.questions.constants
        groups = rank_groups(self.costing.cluster_of(arrangement), arrangement)
        step = StepBound(arrangement, groups, constants, facts.totals)
        fitting = self._fitting(arrangement, facts, step.shared(facts.block), rooms)
        return float("inf") if fitting is _NEVER else step.seconds(fitting, facts.block)

    def _fitting(
        self, arrangement: Arrangement, facts: LayoutFacts, shared: LayerBlock, rooms: Rooms | None
    ) -> FittingBounds:
        """Return the least times of recomputing and of the slowest rank; `rooms` limits memory."""
        again, margin = 0.0, self.questions.constants.margin
        if rooms is not None:
            size = self.questions.most_bytes(arrangement)
            on_host = facts.host_bytes(arrangement) / arrangement.pipeline
            if on_host > self.questions.demands.host_limit_bytes:
                return _NEVER
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
        return FittingBounds(
            recompute_seconds=again,
            bottleneck_seconds=slowest,
            capacities=partial(rank_capacities, shared, room),
        )

    def _room(self, arrangement: Arrangement, facts: LayoutFacts, ranks: Rooms) -> PipelineRoom:
        return PipelineRoom(
            ranks=ranks,
            state_bytes=state_bytes(facts.repeated, arrangement),
            unsharded_bytes=layer_unsharded_bytes(facts.repeated, arrangement),
            transient_bytes=facts.transient_bytes(arrangement),
            margin=self.questions.constants.margin,
            is_one_pass=arrangement.is_one_pass,
        )

    def _rooms(self, arrangement: Arrangement) -> Rooms:
        """Return each rank's memory, as if all its stages had the fewest microbatches in flight."""
        sizes = self.questions.room_bytes(arrangement)
        return tuple(
            (StageRoom(in_flight=one, size_bytes=size),)
            for one, size in zip(in_flight_by_rank(arrangement), sizes, strict=True)
        )

    def _bottleneck(self, shared: LayerBlock, room: PipelineRoom) -> float:
        key = shared, room
        if key not in self._bottlenecks:
            self._bottlenecks[key] = least_bottleneck_seconds(shared, room)
        return self._bottlenecks[key]

    def facts(self, arrangement: Arrangement, solution: int) -> LayoutFacts:
        """Return the facts of one layout solution, each at its minimum over devices."""
        key = layer_key(arrangement, solution), self.questions.kinds(arrangement)
        if key not in self._facts:
            self._facts[key] = facts_of(self._row(*key))
        return self._facts[key]

    def of_any(self, arrangement: Arrangement) -> LayoutFacts:
        """Return facts that are lower limits over all layout solutions and devices."""
        if arrangement.tensor == 1:
            return self.facts(arrangement, 0)
        key = layer_key(arrangement, 0), self.questions.kinds(arrangement)
        if key not in self._of_any:
            self._of_any[key] = facts_of(self._row_of_any(*key))
        return self._of_any[key]

    def _row_of_any(self, fastest: LayerKey, kinds: RankKinds) -> tuple[Modes, ...]:
        unsplit = self._row(replace(fastest, tensor=1), kinds)
        return of_any(self._row(fastest, kinds), unsplit, degree=fastest.tensor)

    def of_least(self, arrangement: Arrangement) -> LayoutFacts:
        """Return facts that are lower limits over all layouts and devices, before any is solved."""
        degree, unsplit = arrangement.tensor, replace(layer_key(arrangement, 0), tensor=1)
        if degree == 1:
            return self.facts(arrangement, 0)
        key = replace(unsplit, tensor=degree), self.questions.kinds(arrangement)
        if key not in self._of_least:
            shares = {share for own in key[1] for share in own}
            least = least_of_all([self.least_on(arrangement, one).classes for one in shares])
            each = [least[one.layer_class] for one in self.costing.subject.layers.layers]
            row = of_least(each, self._row(unsplit, key[1]), degree=degree)
            self._of_least[key] = facts_of(row)
        return self._of_least[key]

    def _row(self, inside: LayerKey, kinds: RankKinds) -> tuple[Modes, ...]:
        return lightest([self.costing.slowest_rows(inside, own) for own in kinds])


class MemoryBounds(Bounds):
    """Lower bounds of the memory of the fullest rank of all plans below a node of the search."""

    def __init__(self, questions: Questions) -> None:
        super().__init__(questions)
        self._state = state_of(self.costing.subject.graph.parameters, self.costing.precision)

    def of_point(self, point: Arrangement) -> float:
        """Return a lower bound of all variants of a point, in any layouts."""
        kinds = product(Zero, Offload)
        return min(
            self._least_bytes(replace(point, zero=level, offload=offload))
            for level, offload in kinds
        )

    def of_kind(self, kind: BoundKind, arrangement: Arrangement) -> float:
        """Return a lower bound of an arrangement; infinite if nothing fits into the memory."""
        fits = super().of_kind(kind, arrangement) < float("inf")
        return self._least_bytes(arrangement) if fits else float("inf")

    def _least_bytes(self, arrangement: Arrangement) -> float:
        held = reduced_state_bytes(self._state, arrangement) // arrangement.tensor
        return float(self.questions.constants.context_bytes + held // arrangement.pipeline)


def bounds_of(questions: Questions, objective: Objective) -> Bounds:
    """Return the bounds of what an objective minimises."""
    return MemoryBounds(questions) if objective.memory_alone else Bounds(questions)


def must_recompute(bounds: Bounds, arrangement: Arrangement) -> bool:
    """Whether in all layouts the layers save more than the ranks together have room for."""
    facts, margin = bounds.of_least(arrangement), bounds.questions.constants.margin
    size = bounds.questions.most_bytes(arrangement)
    budget = activation_budget_bytes(
        arrangement,
        rank_bytes=size / (1.0 + margin) - facts.transient_bytes(arrangement),
        state_bytes=facts.state_bytes(arrangement),
    )
    return facts.ladder.saved_bytes > budget
