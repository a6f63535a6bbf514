"""Bounds a node of the search, from the layouts that have been solved so far.

The bounds use facts about layouts inside layers: those of one layout solution, or lower limits over
all of them.
A layer in unsolved layouts takes at least the time of its fastest layouts, or, if these are
unsolved, of its ops in each one's fastest split. It holds, sends, updates and recomputes at least
what the unsplit layer does, divided evenly by the tensor ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from autopar.planner.annotate import state_of
from autopar.planner.cluster.shape import Kind, RowShare
from autopar.planner.costs.prediction import (
    Arrangement,
    Compile,
    LayerCost,
    Modes,
    Offload,
    Recompute,
    Zero,
)
from autopar.planner.costs.steps.memory import layer_unsharded_bytes
from autopar.planner.costs.steps.stage_load import rank_groups
from autopar.planner.costs.steps.state import host_bytes, layer_state_bytes, reduced_state_bytes
from autopar.planner.plan.bounds.bottleneck import (
    LayerBlock,
    PipelineRoom,
    RankCapacities,
    StageRoom,
    block,
    least_bottleneck_seconds,
    least_layer_seconds,
    rank_capacities,
)
from autopar.planner.plan.bounds.least import (
    Ladder,
    LeastLayers,
    activation_budget_bytes,
    in_flight_by_rank,
    ladder,
    least_layers,
    least_of_all,
    least_recompute_seconds,
    lightest,
    of_any,
    of_least,
)
from autopar.planner.plan.bounds.step import Ends, FittingBounds, LeastTotals, StepBound
from autopar.planner.plan.declared.constraints import Objective
from autopar.planner.plan.solving.candidate import Questions, layer_key
from autopar.planner.plan.solving.prices import LayerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """Facts about the layers in some layouts, for the bounds."""

    totals: LeastTotals
    ladder: Ladder
    block: LayerBlock
    ends: Ends
    repeated: LayerCost  # one of the repeated layers
    kinds: tuple[tuple[Modes, int], ...]  # of layers, each with its count

    def state_bytes(self, arrangement: Arrangement) -> int:
        """Return the bytes of parameters, gradients and states of all layers under ZeRO."""
        return sum(
            number * layer_state_bytes(modes[Recompute.NONE], arrangement)
            for modes, number in self.kinds
        )

    def host_bytes(self, arrangement: Arrangement) -> int:
        """Return what all layers have in the host's memory, those of all stages together."""
        return sum(
            number * host_bytes(modes[Recompute.NONE], arrangement) for modes, number in self.kinds
        )

    def least_alone_bytes(self, arrangement: Arrangement) -> int:
        """Return the least memory of a rank that holds only the layer with the largest need."""
        return max(_alone_bytes(modes, arrangement) for modes, _ in self.kinds)

    def transient_bytes(self, arrangement: Arrangement) -> int:
        """Return the least transient memory of every stage.

        With a pipeline it is 0, since a stage may lack the layers that need it. Without one, the
        single stage runs every layer. If a step has only one backward, only the need of the last
        layer counts: no other layer runs while everything is saved.
        """
        if arrangement.pipeline > 1:
            return 0
        if arrangement.is_one_pass:
            return self.ladder.last_transient_bytes
        return self.ladder.transient_bytes


def facts_of(row: Sequence[Modes]) -> LayoutFacts:
    """Return the facts of a row of layers; equal layers are one object."""
    numbers = Counter(map(id, row))
    kinds = {id(modes): modes for modes in row}
    repeated = kinds[max(numbers, key=lambda one: numbers[one])]
    return LayoutFacts(
        totals=_totals([modes[Recompute.NONE] for modes in row]),
        ladder=ladder(row),
        block=block(row),
        ends=_ends(row, repeated),
        repeated=repeated[Recompute.NONE],
        kinds=tuple((kinds[one], number) for one, number in numbers.items()),
    )


def _alone_bytes(modes: Modes, arrangement: Arrangement) -> int:
    return layer_state_bytes(modes[Recompute.NONE], arrangement) + min(
        one.saved_bytes + one.transient_bytes + layer_unsharded_bytes(one, arrangement)
        for one in modes.values()
    )


def _ends(row: Sequence[Modes], repeated: Modes) -> Ends:
    is_repeated = [modes is repeated for modes in row]
    leading, trailing = is_repeated.index(True), is_repeated[::-1].index(True)
    return Ends(
        leading=leading,
        trailing=trailing,
        between=is_repeated.count(False) - leading - trailing,
        first_seconds=least_layer_seconds(row[0]) if leading else 0.0,
        last_seconds=least_layer_seconds(row[-1]) if trailing else 0.0,
    )


def _totals(plain: Sequence[LayerCost]) -> LeastTotals:
    return LeastTotals(
        forward_seconds=sum(one.forward_seconds for one in plain),
        backward_seconds=sum(one.backward_seconds for one in plain),
        input_gradient_seconds=sum(
            one.backward_seconds - one.weight_gradient_seconds for one in plain
        ),
        parameter_bytes=sum(one.parameter_bytes for one in plain),
        gradient_bytes=sum(one.gradient_bytes for one in plain),
        trainable=sum(one.trainable for one in plain),
        least_output_bytes=min((one.output_bytes for one in plain[:-1]), default=0),
    )


RankKinds = tuple[Kind, ...]  # distinct kinds of pipeline ranks
Rooms = tuple[tuple[StageRoom, ...], ...]  # of each rank, by stage

_ENDLESS: Rooms = ((StageRoom(in_flight=1, size_bytes=1e30),),)
_NEVER = FittingBounds(
    recompute_seconds=float("inf"),
    bottleneck_seconds=float("inf"),
    capacities=RankCapacities(ranks=()),
)


class Bounds:
    """Lower bounds, under one objective, of all plans below a node of the search."""

    def __init__(self, questions: Questions, objective: Objective) -> None:
        self.questions, self.costing, self.objective = questions, questions.costing, objective
        subject = self.costing.subject
        self.state = state_of(subject.graph.parameters, self.costing.precision)
        self._least: dict[tuple[int, Compile, RowShare], LeastLayers] = {}
        self._facts: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._of_any: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._of_least: dict[tuple[LayerKey, RankKinds], LayoutFacts] = {}
        self._bottlenecks: dict[tuple[LayerBlock, PipelineRoom], float] = {}

    def of_point(self, point: Arrangement) -> float:
        """Return a lower bound of all variants of a point, in any layouts."""
        if self.objective is Objective.MEMORY:
            kinds = product(Zero, Offload)
            every = [replace(point, zero=level, offload=offload) for level, offload in kinds]
            return float(min(map(self.least_memory, every)))
        least = [[self.least_on(point, one) for one in own] for own in self.questions.kinds(point)]
        slowest = min(max(one.bottleneck_seconds(point.pipeline) for one in own) for own in least)
        through = min(max(one.through_seconds for one in own) for own in least)
        return max(through, point.microbatches * slowest)

    def least_on(self, point: Arrangement, share: RowShare) -> LeastLayers:
        """Return the least times of the layers on a device, for its rows of a microbatch."""
        key = point.tensor, point.compile, share
        if key not in self._least:
            self._least[key] = least_layers(
                self.costing.pricer(share, point.compile),
                self.costing.subject.layers,
                tensor=point.tensor,
                rules=self.costing.rules,
            )
        return self._least[key]

    def unsolved(self, arrangement: Arrangement) -> float:
        """Return a lower bound within the memory, before any layouts are solved."""
        rooms = self._rooms(arrangement)
        best = self._bound(arrangement, self.of_least(arrangement), rooms)
        return self._of_objective(arrangement, best)

    def without_memory(self, arrangement: Arrangement) -> float:
        """Return a lower bound without memory limits."""
        if self.objective is Objective.MEMORY:
            return float(self.least_memory(arrangement))
        return self._bound(arrangement, self.of_any(arrangement), None)

    def within_memory(self, arrangement: Arrangement) -> float:
        """Return a lower bound within the memory, in any layouts; infinite if nothing fits."""
        rooms = self._rooms(arrangement)
        best = self._bound(arrangement, self.of_any(arrangement), rooms)
        return self._of_objective(arrangement, best)

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
        return self._of_objective(arrangement, best)

    def of_solution(self, arrangement: Arrangement, solution: int) -> float:
        """Return a lower bound in the layouts of one solution; infinite if nothing fits."""
        rooms = self._rooms(arrangement)
        return self._bound(arrangement, self.facts(arrangement, solution), rooms)

    def _of_objective(self, arrangement: Arrangement, least_seconds: float) -> float:
        """Return the lower bound of the objective, from the step's; infinite if nothing fits."""
        if self.objective is Objective.MEMORY and least_seconds < float("inf"):
            return float(self.least_memory(arrangement))
        return least_seconds

    def _bound(self, arrangement: Arrangement, facts: LayoutFacts, rooms: Rooms | None) -> float:
        """Return the lower bound of a step in some layouts.

        `rooms` is the memory of the ranks, or None for no memory limit.
        """
        constants = self.questions.constants
        groups = rank_groups(self.costing.cluster_of(arrangement), arrangement)
        step = StepBound(arrangement, groups, constants, facts.totals)
        pressed = self._pressed(arrangement, facts, step.shared(facts.block), rooms)
        return float("inf") if pressed is _NEVER else step.seconds(pressed, facts.block)

    def _pressed(
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
            capacities=rank_capacities(shared, room),
        )

    def _room(self, arrangement: Arrangement, facts: LayoutFacts, ranks: Rooms) -> PipelineRoom:
        return PipelineRoom(
            ranks=ranks,
            state_bytes=layer_state_bytes(facts.repeated, arrangement),
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

    def least_state(self, arrangement: Arrangement) -> int:
        """Return a tensor rank's bytes of all parameters, gradients and states under ZeRO."""
        return reduced_state_bytes(self.state, arrangement) // arrangement.tensor

    def least_memory(self, arrangement: Arrangement) -> int:
        """Return the least memory of an arrangement's fullest rank."""
        held = self.least_state(arrangement) // arrangement.pipeline
        return self.questions.constants.context_bytes + held

    def facts(self, arrangement: Arrangement, solution: int) -> LayoutFacts:
        """Return the facts of one layout solution, each at its minimum over devices."""
        key = layer_key(arrangement, solution), self.questions.kinds(arrangement)
        if key not in self._facts:
            self._facts[key] = facts_of(self._row(*key))
        return self._facts[key]

    def of_any(self, arrangement: Arrangement) -> LayoutFacts:
        """Return facts that are lower limits over all layout solutions and devices."""
        degree, fastest = arrangement.tensor, layer_key(arrangement, 0)
        if degree == 1:
            return self.facts(arrangement, 0)
        key = fastest, self.questions.kinds(arrangement)
        if key not in self._of_any:
            unsplit = self._row(replace(fastest, tensor=1), key[1])
            row = of_any(self._row(*key), unsplit, degree=degree)
            self._of_any[key] = facts_of(row)
        return self._of_any[key]

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


def must_recompute(bounds: Bounds, arrangement: Arrangement) -> bool:
    """Whether the layers' saved tensors together exceed the room of the ranks."""
    facts, margin = bounds.of_any(arrangement), bounds.questions.constants.margin
    size = bounds.questions.most_bytes(arrangement)
    budget = activation_budget_bytes(
        arrangement,
        rank_bytes=size / (1.0 + margin) - facts.transient_bytes(arrangement),
        state_bytes=facts.state_bytes(arrangement),
    )
    return facts.ladder.saved_bytes > budget
