"""Builds the order of each pipeline schedule, action for action as torch runs it.

Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, arXiv 2006.09503), interleaved 1F1B (arXiv
2104.04473), zero bubble ZB-H1 and ZB-V (arXiv 2401.10241). Where the papers leave choices (warm-up
lengths, rounds of microbatches, ties), torch's choice is taken: the emitted script runs torch's
schedules, and the predicted cost must be theirs.
"""

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
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


def columns_of(actions: Sequence[Action]) -> tuple[Numbers, Numbers, Numbers]:
    """Return each action's stage, the index of its kind in ActionKind, and its microbatch."""
    stages, kinds, microbatches = zip(*actions, strict=True)
    places = {kind: place for place, kind in enumerate(ActionKind)}
    return np.array(stages), np.array([places[kind] for kind in kinds]), np.array(microbatches)


_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards."""
    _require_positive(stages=stages, microbatches=microbatches)
    return tuple(
        tuple(Action(stage, kind, mb) for kind in (_F, _B) for mb in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B: a stage warms up with one forward per later stage, then alternates.

    Also defined for fewer microbatches than stages, which Megatron runs and torch rejects.
    """
    _require_positive(stages=stages, microbatches=microbatches)
    return tuple(
        _alternate(
            [Action(stage, _F, mb) for mb in range(microbatches)],
            [Action(stage, _B, mb) for mb in range(microbatches)],
            warmup=stages - 1 - stage,
        )
        for stage in range(stages)
    )


def interleaved_1f1b(ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Return interleaved 1F1B: rank r runs the stages r, r + ranks, … in turn, a round of each.

    With one stage per rank it is not 1F1B: the warm-up is twice as long.
    """
    per_round = microbatches_per_round(ranks, stages_per_rank, microbatches)
    return tuple(
        _alternate(
            _in_rounds(_F, range(rank, ranks * stages_per_rank, ranks), microbatches, per_round),
            _in_rounds(_B, _reversed_stages(rank, ranks, stages_per_rank), microbatches, per_round),
            warmup=(stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank),
        )
        for rank in range(ranks)
    )


def interleaved_zero_bubble(ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Return interleaved zero bubble (ZB-H1 for one stage per rank): weight gradients fill gaps.

    Rank r delays each weight gradient by r input gradients.
    """
    per_round = microbatches_per_round(ranks, stages_per_rank, microbatches)
    orders = []
    for rank in range(ranks):
        backward_stages = _reversed_stages(rank, ranks, stages_per_rank)
        order = _alternate(
            _in_rounds(_F, range(rank, ranks * stages_per_rank, ranks), microbatches, per_round),
            _in_rounds(_I, backward_stages, microbatches, per_round),
            warmup=(stages_per_rank - 1) * per_round + ranks - 1 - rank,
        )
        weights = _in_rounds(_W, backward_stages, microbatches, per_round)
        orders.append(_with_weight_gradients(order, weights, delay=rank))
    return tuple(orders)


def zero_bubble_v(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-V: rank r runs stage r on the way down and stage 2·ranks − 1 − r on the way up.

    The order is made for at least 2·ranks − 1 microbatches; those that do not exist are left out.
    """
    _require_positive(ranks=ranks, microbatches=microbatches)
    return tuple(_zero_bubble_v_order(rank, ranks, microbatches) for rank in range(ranks))


def microbatches_per_round(ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """Return how many microbatches an interleaved schedule runs through one stage in a row.

    It is `ranks` if that divides the microbatches, else microbatches ÷ ⌊microbatches ÷ ranks⌋, as
    in torch.
    """
    _require_positive(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=microbatches)
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise InputError(
            f"{microbatches} microbatches do not fill {rounds} equal rounds",
            expected=f"an interleaved schedule on {ranks} ranks runs {rounds} equal rounds",
            fix=f"take a multiple of {ranks} microbatches",
        )
    return microbatches // rounds


def _require_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise InputError(
                f"{count} {name.replace('_', ' ')} in a pipeline schedule",
                expected="every count is at least 1",
            )


def _reversed_stages(rank: int, ranks: int, stages_per_rank: int) -> Sequence[int]:
    return range(rank, ranks * stages_per_rank, ranks)[::-1]


def _in_rounds(
    kind: ActionKind, stages: Sequence[int], microbatches: int, per_round: int
) -> list[Action]:
    """Return all actions of a kind: a round of microbatches through each stage, then the next."""
    return [
        Action(stage, kind, mb)
        for first in range(0, microbatches, per_round)
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
    seen: Counter[tuple[int, ActionKind]] = Counter()
    order = []
    for stage, kind in moves:
        order.append(Action(stage, kind, seen[stage, kind]))
        seen[stage, kind] += 1
    return tuple(action for action in order if action.microbatch < microbatches)
