"""Builds the order of each pipeline schedule, action for action as torch runs it.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B (arXiv
2104.04473), zero bubble ZB-H1 and ZB-V (arXiv 2401.10241). Where the papers leave choices (warm-up
lengths, rounds of microbatches, ties), torch's choice is taken: the emitted script runs torch's
schedules, and the predicted cost must be theirs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.errors import InputError


class ActionKind(StrEnum):
    """An action of a stage for one microbatch, with the letters of torch.distributed.pipelining."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights at once
    INPUT_GRADIENT = "I"  # the half of the backward that the previous stage waits for
    WEIGHT_GRADIENT = "W"  # the half that no other rank waits for


class Action(NamedTuple):
    """A stage, the kind of action, and a microbatch; in the order of torch's notation."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# For each rank, its actions in order.
Schedule = tuple[tuple[Action, ...], ...]
Numbers = npt.NDArray[np.int64]
FEW_ROUNDS = 3  # most schedules repeat after the second round; the third shows how long one takes


def columns_of(actions: Sequence[Action]) -> tuple[Numbers, Numbers, Numbers]:
    """Return each action's stage, the index of its kind in ActionKind, and its microbatch."""
    stages, kinds, microbatches = zip(*actions, strict=True)
    places = {kind: place for place, kind in enumerate(ActionKind)}
    return np.array(stages), np.array([places[kind] for kind in kinds]), np.array(microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The number of ranks, of stages on each, and of microbatches."""

    ranks: int
    stages_per_rank: int
    microbatches: int

    def __post_init__(self) -> None:
        """Refuse counts below 1."""
        if min(self.ranks, self.stages_per_rank, self.microbatches) < 1:
            raise InputError(
                f"a pipeline of {self.ranks} ranks, {self.stages_per_rank} stages per rank and "
                f"{self.microbatches} microbatches",
                expected="every count is at least 1",
            )

    @property
    def stages(self) -> int:
        """The stages of the whole pipeline."""
        return self.ranks * self.stages_per_rank

    @property
    def rounds(self) -> int:
        """The rounds of an interleaved schedule; each fills the ranks with microbatches."""
        return max(1, self.microbatches // self.ranks)


def few_rounds(shape: PipelineShape) -> PipelineShape:
    """Return the shape with only a few rounds of microbatches, if it has more whole rounds."""
    rounds, rest = divmod(shape.microbatches, shape.ranks)
    if rest or rounds <= FEW_ROUNDS:
        return shape
    return replace(shape, microbatches=FEW_ROUNDS * shape.ranks)


_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def gpipe(shape: PipelineShape) -> Schedule:
    """Return GPipe: all forwards, then all backwards."""
    return tuple(
        tuple(Action(stage, kind, mb) for kind in (_F, _B) for mb in range(shape.microbatches))
        for stage in range(shape.ranks)
    )


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """Return 1F1B: a stage warms up with one forward per later stage, then alternates.

    Also defined for fewer microbatches than stages, which Megatron runs and torch rejects.
    """
    return tuple(
        _alternate(
            [Action(stage, _F, mb) for mb in range(shape.microbatches)],
            [Action(stage, _B, mb) for mb in range(shape.microbatches)],
            warmup=shape.ranks - 1 - stage,
        )
        for stage in range(shape.ranks)
    )


def interleaved_1f1b(shape: PipelineShape) -> Schedule:
    """Return interleaved 1F1B: rank r runs stages r, r + ranks, … in turn, a round on each.

    With one stage per rank it is not 1F1B: the warm-up is twice as long.
    """
    return tuple(
        _alternate(
            _in_rounds(_F, own, shape),
            _in_rounds(_B, own[::-1], shape),
            warmup=_first_rounds(shape) + 2 * (shape.ranks - 1 - rank),
        )
        for rank, own in enumerate(_stages_by_rank(shape))
    )


def interleaved_zero_bubble(shape: PipelineShape) -> Schedule:
    """Return interleaved zero bubble (ZB-H1 for one stage per rank): weight gradients fill gaps.

    Rank r delays each weight gradient by r input gradients.
    """
    orders = []
    for rank, own in enumerate(_stages_by_rank(shape)):
        order = _alternate(
            _in_rounds(_F, own, shape),
            _in_rounds(_I, own[::-1], shape),
            warmup=_first_rounds(shape) + shape.ranks - 1 - rank,
        )
        weights = _in_rounds(_W, own[::-1], shape)
        orders.append(_with_weight_gradients(order, weights, delay=rank))
    return tuple(orders)


def zero_bubble_v(shape: PipelineShape) -> Schedule:
    """Return ZB-V: rank r runs stage r on the way down and stage 2·ranks − 1 − r on the way up.

    With fewer than 2·ranks − 1 microbatches, it is the order of 2·ranks − 1 without the rest.
    """
    ranks, microbatches = shape.ranks, shape.microbatches
    return tuple(_zero_bubble_v_order(rank, ranks, microbatches) for rank in range(ranks))


def _stages_by_rank(shape: PipelineShape) -> list[range]:
    return [range(rank, shape.stages, shape.ranks) for rank in range(shape.ranks)]


def _first_rounds(shape: PipelineShape) -> int:
    """Return the number of a rank's forwards in one round, without those of its last stage."""
    return (shape.stages_per_rank - 1) * (shape.microbatches // shape.rounds)


def _in_rounds(kind: ActionKind, stages: Sequence[int], shape: PipelineShape) -> list[Action]:
    """Return all actions of a kind: a round of microbatches through each stage, then the next.

    A round has as many microbatches as there are ranks, if that makes all rounds full. Otherwise
    it has microbatches ÷ ⌊microbatches ÷ ranks⌋, as in torch.
    """
    per_round = shape.microbatches // shape.rounds
    return [
        Action(stage, kind, mb)
        for first in range(0, shape.microbatches, per_round)
        for stage in stages
        for mb in range(first, first + per_round)
    ]


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int
) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forward and backward alternating."""
    order = list(forwards[:warmup])
    remaining = forwards[warmup:]
    for index, backward in enumerate(backwards):
        order.extend(remaining[index : index + 1])
        order.append(backward)
    return tuple(order)


def _with_weight_gradients(
    order: Sequence[Action], weights: Sequence[Action], *, delay: int
) -> tuple[Action, ...]:
    """Return the order with each weight gradient delayed by `delay` input gradients."""
    result: list[Action] = []
    input_gradients = 0
    for action in order:
        result.append(action)
        if action.kind is _I:
            if input_gradients >= delay:
                result.append(weights[input_gradients - delay])
            input_gradients += 1
    return (*result, *weights[max(0, input_gradients - delay) :])


def _zero_bubble_v_order(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Return one rank's order, phase by phase.

    Each (stage, kind) takes the microbatches in order.
    """
    down, up = rank, 2 * ranks - 1 - rank
    planned = max(2 * ranks - 1, microbatches)
    full_turns = planned - (2 * ranks - rank - 1)  # turns of the steady phase that have a forward
    down_backward, up_turn = [(down, _I), (down, _W)], [(up, _F), (up, _I), (up, _W)]
    moves = [
        *[(down, _F)] * (2 * (ranks - rank) - 1),
        *[(up, _F), (down, _F)] * rank,
        *up_turn * (ranks - rank),
        *[(down, _F), *down_backward, *up_turn] * full_turns,
        *[*down_backward, *up_turn] * (ranks - rank - 1),
        *[(down, _I), (up, _I)] * rank,
        *down_backward * (ranks - rank),
        *[(up, _W)] * rank,
        *[(down, _W)] * rank,
    ]
    numbers: defaultdict[tuple[int, ActionKind], Iterator[int]] = defaultdict(count)
    order = [Action(*move, next(numbers[move])) for move in moves]
    return tuple(action for action in order if action.microbatch < microbatches)
