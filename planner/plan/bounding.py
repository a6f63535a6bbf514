"""Bounds what a node of the search can come to, from the layouts that are solved by then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.planner.annotate import state_of
from autopar.planner.costs.memory import layer_state_bytes, layer_unsharded_bytes
from autopar.planner.costs.prediction import Arrangement, LayerCost, Recompute, Zero
from autopar.planner.costs.rank_groups import rank_groups
from autopar.planner.plan.bottleneck import (
    Block,
    Places,
    Room,
    StageRoom,
    block,
    least_bottleneck_seconds,
    least_layer_seconds,
    places,
)
from autopar.planner.plan.constraints import Objective
from autopar.planner.plan.costing import Inside, Modes
from autopar.planner.plan.least import LeastLayers, least_layers
from autopar.planner.plan.questions import Questions, inside_of
from autopar.planner.plan.relaxed_memory import (
    Ladder,
    activation_budget_bytes,
    in_flight_by_rank,
    ladder,
    least_recompute_seconds,
    lightest,
)
from autopar.planner.plan.step_bound import Ends, Pressed, StepBound, Totals
from autopar.planner.plan.whole_layers import find_places
from autopar.planner.programs.stage_shares import shares_of

_ENDLESS = 1e30  # bytes
_MOST_WHOLE = 64  # layers of a rank: of more, it matters little that they are whole
_NEVER = Pressed(
    recompute_seconds=float("inf"), bottleneck_seconds=float("inf"), places=Places(ranks=())
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What the bounds need to know of one layout solution."""

    totals: Totals
    ladder: Ladder
    block: Block
    ends: Ends
    repeated: LayerCost  # one of the block's layers
    kinds: tuple[tuple[Modes, int], ...]  # of layers, each with its number

    def state_bytes(self, arrangement: Arrangement) -> int:
        """Return the state of all layers, as ZeRO divides it."""
        return sum(
            number * layer_state_bytes(modes[Recompute.NONE], arrangement)
            for modes, number in self.kinds
        )

    def least_alone_bytes(self, arrangement: Arrangement) -> int:
        """Return what some layer needs at least, were it alone on its rank."""
        return max(_alone_bytes(modes, arrangement) for modes, _ in self.kinds)


class Bounds:
    """What no leaf below a node beats, under one objective."""

    def __init__(self, questions: Questions, objective: Objective) -> None:
        self.questions, self.costing, self.objective = questions, questions.costing, objective
        subject = self.costing.subject
        self.devices = tuple(dict.fromkeys(node.device for node in self.costing.cluster.nodes))
        self.held = state_of(subject.graph.parameters, self.costing.precision)
        self._least: dict[tuple[int, int], tuple[LeastLayers, ...]] = {}
        self._facts: dict[Inside, LayoutFacts] = {}
        self._bottlenecks: dict[tuple[Block, Room], float] = {}
        self._rooms_shared: dict[tuple[Arrangement, int], tuple[tuple[StageRoom, ...], ...]] = {}

    def of_point(self, point: Arrangement) -> float:
        """Return what no variant of a point beats, whatever the layouts."""
        if self.objective is Objective.MEMORY:
            return float(self.least_memory(replace(point, zero=Zero.PARAMETERS)))
        key = point.tensor, point.microbatch
        if key not in self._least:
            self._least[key] = tuple(
                least_layers(
                    self.costing.pricer(point.microbatch, device),
                    self.costing.subject.layers,
                    tensor=point.tensor,
                    rules=self.costing.rules,
                )
                for device in self.devices
            )
        least = self._least[key]
        slowest = min(one.bottleneck_seconds(point.pipeline) for one in least)
        through = min(one.through_seconds for one in least)
        return max(through, point.microbatches * slowest)

    def without_memory(self, arrangement: Arrangement) -> float:
        """Return what no choice of stages and layouts beats, had every rank endless memory."""
        if self.objective is Objective.MEMORY:
            return float(self.least_memory(arrangement))
        return self._of_layouts(arrangement, 0, limited=False)

    def of_variant(self, arrangement: Arrangement) -> float:
        """Return what no choice of stages and layouts beats; infinite where none can fit."""
        best = self.of_solution(arrangement, 0)
        # The fastest layouts are so for what they compute, not for what ZeRO-2 and 3 send of them.
        is_sent = arrangement.zero >= Zero.GRADIENTS and arrangement.tensor > 1
        if is_sent or best > self._of_layouts(arrangement, 0, limited=False):
            solutions = self.costing.solutions(arrangement.tensor, arrangement.microbatch)
            others = range(1, len(solutions))
            best = min([best, *(self.of_solution(arrangement, number) for number in others)])
        if self.objective is Objective.MEMORY and best < float("inf"):
            return float(self.least_memory(arrangement))
        return best

    def of_solution(self, arrangement: Arrangement, solution: int) -> float:
        """Return what no choice of stages beats in one of the layouts; infinite: none fits."""
        return self._of_layouts(arrangement, solution, limited=True)

    def excludes(self, arrangement: Arrangement, solution: int, seconds: float) -> bool:
        """Return whether no choice of stages in one of the layouts can take less than some seconds.

        Sharper than the bound, and slower: for what would be solved otherwise.
        """
        facts = self.facts(arrangement, solution)
        if arrangement.pipeline == 1 or facts.block.count > _MOST_WHOLE * arrangement.pipeline:
            return False
        groups = rank_groups(self.costing.cluster, arrangement)
        step = StepBound(arrangement, groups, self.questions.constants, facts.totals)
        size = self.questions.most_bytes(arrangement)
        room = self._room(arrangement, facts, self._rooms(arrangement, solution, size))
        return not find_places(
            step.shared(facts.block),
            room,
            step.rank_times(facts.block, facts.ends),
            microbatches=arrangement.microbatches,
            within_seconds=seconds,
        )

    def _of_layouts(self, arrangement: Arrangement, solution: int, *, limited: bool) -> float:
        """Return the bound of a step for one layout solution, within the memory or without it."""
        facts = self.facts(arrangement, solution)
        constants = self.questions.constants
        groups = rank_groups(self.costing.cluster, arrangement)
        step = StepBound(arrangement, groups, constants, facts.totals)
        shared = step.shared(facts.block)
        pressed = self._pressed(arrangement, solution, facts, shared, limited=limited)
        return float("inf") if pressed is _NEVER else step.seconds(pressed, facts.block)

    def _pressed(
        self,
        arrangement: Arrangement,
        solution: int,
        facts: LayoutFacts,
        shared: Block,
        *,
        limited: bool,
    ) -> Pressed:
        """Return the least time of recomputing and of the slowest rank, within the memory or not.

        The one stage of no pipeline has the transient memory of every layer in it.
        """
        again, margin = 0.0, self.questions.constants.margin
        transient = _transient_bytes(arrangement, facts)
        endless = (StageRoom(in_flight=1, size_bytes=_ENDLESS),)
        rooms: tuple[tuple[StageRoom, ...], ...] = (endless,) * arrangement.pipeline
        if limited:
            size = self.questions.most_bytes(arrangement)
            if facts.least_alone_bytes(arrangement) * (1.0 + margin) > size:
                return _NEVER
            budget = activation_budget_bytes(
                arrangement,
                rank_bytes=size / (1.0 + margin) - transient,
                state_bytes=facts.state_bytes(arrangement),
            )
            again = least_recompute_seconds(facts.ladder, budget)
            rooms = self._rooms(arrangement, solution, size)
        room = self._room(arrangement, facts, rooms)
        slowest = self._bottleneck(shared, room)
        if max(again, slowest) == float("inf"):
            return _NEVER
        return Pressed(
            recompute_seconds=again, bottleneck_seconds=slowest, places=places(shared, room)
        )

    def _room(
        self,
        arrangement: Arrangement,
        facts: LayoutFacts,
        ranks: tuple[tuple[StageRoom, ...], ...],
    ) -> Room:
        return Room(
            ranks=ranks,
            state_bytes=layer_state_bytes(facts.repeated, arrangement),
            unsharded_bytes=layer_unsharded_bytes(facts.repeated, arrangement),
            transient_bytes=_transient_bytes(arrangement, facts),
            margin=self.questions.constants.margin,
        )

    def _rooms(
        self, arrangement: Arrangement, solution: int, size: int
    ) -> tuple[tuple[StageRoom, ...], ...]:
        """Return the memory of the stages of each rank; several divide it as the solver does."""
        if arrangement.stages_per_rank == 1:
            in_flight = in_flight_by_rank(arrangement)
            return tuple((StageRoom(in_flight=one, size_bytes=size),) for one in in_flight)
        key = arrangement, solution
        if key not in self._rooms_shared:
            self._rooms_shared[key] = self._shared_rooms(arrangement, solution)
        return self._rooms_shared[key]

    def _shared_rooms(
        self, arrangement: Arrangement, solution: int
    ) -> tuple[tuple[StageRoom, ...], ...]:
        choices, limits = self.questions.asked(arrangement, solution)
        shares = shares_of(choices, limits)
        rooms: list[list[StageRoom]] = [[] for _ in range(arrangement.pipeline)]
        for stage, (limit, share) in enumerate(zip(limits.stages, shares, strict=True)):
            one = StageRoom(
                in_flight=limit.in_flight,
                size_bytes=share.memory_bytes,
                reserved_bytes=share.reserved_bytes or 0,
            )
            rooms[limits.rank_of(stage)].append(one)
        return tuple(map(tuple, rooms))

    def _bottleneck(self, shared: Block, room: Room) -> float:
        key = shared, room
        if key not in self._bottlenecks:
            self._bottlenecks[key] = least_bottleneck_seconds(shared, room)
        return self._bottlenecks[key]

    def least_state(self, arrangement: Arrangement) -> int:
        """Return the bytes of all parameters' state, split evenly over the tensor axis."""
        held, shard, zero = self.held, arrangement.shard, arrangement.zero
        return (
            (held.parameter_bytes if zero < Zero.PARAMETERS else 0)  # bf16: the optimizer's copies
            + held.gradient_bytes // (shard if zero >= Zero.GRADIENTS else 1)
            + held.optimizer_bytes // (shard if zero >= Zero.OPTIMIZER else 1)
        ) // arrangement.tensor

    def least_memory(self, arrangement: Arrangement) -> int:
        """Return what the fullest rank of an arrangement holds at least."""
        held = self.least_state(arrangement) // arrangement.pipeline
        return self.questions.constants.context_bytes + held

    def facts(self, arrangement: Arrangement, solution: int) -> LayoutFacts:
        """Return what the bounds need to know of one layout solution, at its least anywhere."""
        inside = inside_of(arrangement, solution)
        if inside not in self._facts:
            row = lightest([self.costing.rows(inside, device) for device in self.devices])
            numbers = Counter(map(id, row))
            kinds = {id(modes): modes for modes in row}
            repeated = kinds[max(numbers, key=lambda one: numbers[one])]
            self._facts[inside] = LayoutFacts(
                totals=_totals([modes[Recompute.NONE] for modes in row]),
                ladder=ladder(row),
                block=block(row),
                ends=_ends(row, repeated),
                repeated=repeated[Recompute.NONE],
                kinds=tuple((kinds[one], number) for one, number in numbers.items()),
            )
        return self._facts[inside]


def _transient_bytes(arrangement: Arrangement, facts: LayoutFacts) -> int:
    """Return what every stage has at least: the one of no pipeline has every layer in it."""
    return facts.ladder.transient_bytes if arrangement.pipeline == 1 else 0


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


def _alone_bytes(modes: Modes, arrangement: Arrangement) -> int:
    plain = modes[Recompute.NONE]
    held = layer_state_bytes(plain, arrangement) + layer_unsharded_bytes(plain, arrangement)
    return held + min(one.saved_bytes + one.transient_bytes for one in modes.values())


def _totals(plain: Sequence[LayerCost]) -> Totals:
    return Totals(
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
