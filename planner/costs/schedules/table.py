"""The table of pipeline schedules: requirements, orders, memory, and names in torch.

Also counts the microbatches whose activations a stage holds at once, by closed form. A microbatch
is in flight on a stage from its forward until its backward ends, or its weight gradient if the
backward is split: torch keeps the whole graph between the two halves, and the output gradients of
ops with weights (deferred). A rank computes one action at a time, so the counts follow from its
order alone, not from the actions' costs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from autopar.planner.costs.schedules.orders import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    microbatches_per_round,
    one_f_one_b,
    zero_bubble_v,
)
from autopar.planner.costs.schedules.simulation import Transfer
from autopar.planner.errors import InputError


def gpipe_in_flight(microbatches: int) -> int:
    """Return m: every stage holds every microbatch between the two phases."""
    return microbatches


def one_f_one_b_in_flight(stage: int, *, stages: int, microbatches: int) -> int:
    """Return min(m, p − stage): one for the stage and one for each stage after it."""
    return min(microbatches, stages - stage)


def interleaved_in_flight(
    stage: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_round: int
) -> int:
    """Return the most microbatches that a stage of interleaved 1F1B holds (`_peak_in_rounds`)."""
    warmup = (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - stage % ranks)
    return _peak_in_rounds(
        stage // ranks,
        chunks=stages_per_rank,
        microbatches=microbatches,
        per_round=per_round,
        warmup=warmup,
        delay=0,
    )


def interleaved_zero_bubble_in_flight(
    stage: int, *, ranks: int, stages_per_rank: int, microbatches: int, per_round: int
) -> int:
    """Return the most microbatches that a stage holds; min(m, p) if each rank has one stage."""
    rank = stage % ranks
    return _peak_in_rounds(
        stage // ranks,
        chunks=stages_per_rank,
        microbatches=microbatches,
        per_round=per_round,
        warmup=(stages_per_rank - 1) * per_round + ranks - 1 - rank,
        delay=rank,
    )


def zero_bubble_v_in_flight(stage: int, *, ranks: int, microbatches: int) -> int:
    """Return min(m, 2p − r) for rank r's stage on the way down, min(m, r + 1) on the way up."""
    going_down = stage < ranks
    rank = stage if going_down else 2 * ranks - 1 - stage
    return min(microbatches, 2 * ranks - rank if going_down else rank + 1)


def _peak_in_rounds(
    chunk: int, *, chunks: int, microbatches: int, per_round: int, warmup: int, delay: int
) -> int:
    """Return the most microbatches that a rank's chunk-th stage holds; stages alternate in rounds.

    After forward number w + i (w of warm-up) the rank has released max(0, i − delay) microbatches:

        in flight = F(w + i + 1) − R(max(0, i − delay))

    F(n) and R(n) count how many of the first n forwards (releases) are this stage's. Both grow by
    one per step inside the stage's turns and are constant outside. So the difference is greatest
    when a turn of forwards has just ended, when one of releases is about to begin, or at the ends.
    """
    period, total = chunks * per_round, chunks * microbatches
    warmup = min(warmup, total)
    if warmup == total:
        return microbatches  # every forward comes before the first release

    def forwards(count: int) -> int:
        return _of_this_turn(count, chunk * per_round, per_round, period)

    def releases(count: int) -> int:
        return _of_this_turn(count, (chunks - 1 - chunk) * per_round, per_round, period)

    last = total - warmup - 1
    turning_points = {0, last, delay}
    for start in range(0, total + period, period):
        turning_points.add(start + (chunk + 1) * per_round - warmup - 1)
        turning_points.add(start + (chunks - 1 - chunk) * per_round + delay)
    return max(
        forwards(warmup + index + 1) - releases(max(0, index - delay))
        for index in turning_points
        if 0 <= index <= last
    )


def _of_this_turn(count: int, turn_begins: int, per_round: int, period: int) -> int:
    """Return how many of the first `count` actions are in this stage's turn of each period."""
    periods, rest = divmod(count, period)
    return periods * per_round + min(max(rest - turn_begins, 0), per_round)


SETTLED_ROUNDS = 3  # rounds, after which the number of microbatches in flight grows no more


class ScheduleKind(StrEnum):
    """The order in which pipeline stages run microbatches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED_1F1B = "interleaved-1f1b"
    INTERLEAVED_ZERO_BUBBLE = "interleaved-zero-bubble"
    ZERO_BUBBLE_V = "zero-bubble-v"

    @property
    def has_closed_form(self) -> bool:
        """Whether its step has a closed form: one stage per rank, no split backward."""
        return self in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The number of ranks, of stages on each, and of microbatches."""

    ranks: int
    stages_per_rank: int
    microbatches: int

    @property
    def stages(self) -> int:
        """The stages of the whole pipeline."""
        return self.ranks * self.stages_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The facts about one schedule."""

    torch_class: str  # in torch.distributed.pipelining
    # as in torch: with one stage per rank, a tensor is received only when it is needed
    transfer: Transfer
    splits_backward: bool
    # neighbours have process groups of their own, so that no message blocks another
    has_pairs: bool
    order: Callable[[PipelineShape], Schedule]
    in_flight: Callable[[int, PipelineShape], int]
    refusal: Callable[[PipelineShape], str]


@lru_cache(maxsize=2)  # one schedule is used twice: for its moments, and to simulate it
def schedule_of(kind: ScheduleKind, shape: PipelineShape) -> Schedule:
    """Return the actions of each rank; raises InputError if torch does not run such a schedule."""
    refused = refusal(kind, shape)
    if refused:
        raise InputError(refused, where=f"pipeline schedule {kind}")
    return SCHEDULES[kind].order(shape)


def refusal(kind: ScheduleKind, shape: PipelineShape) -> str:
    """Return why torch does not run this schedule in this shape, or ""."""
    return SCHEDULES[kind].refusal(shape)


def in_flight_microbatches(kind: ScheduleKind, stage: int, shape: PipelineShape) -> int:
    """Return the most microbatches that a stage holds activations of at once, by closed form."""
    return SCHEDULES[kind].in_flight(stage, shape)


def settled(shape: PipelineShape) -> PipelineShape:
    """Return a shape with fewer microbatches but as many in flight at once, if there is one."""
    rounds, rest = divmod(shape.microbatches, shape.ranks)
    if rest or rounds <= SETTLED_ROUNDS:
        return shape
    return replace(shape, microbatches=SETTLED_ROUNDS * shape.ranks)


def _gpipe_refusal(shape: PipelineShape) -> str:
    return _wrong_stages_per_rank(shape, 1)


def _one_f_one_b_refusal(shape: PipelineShape) -> str:
    too_few = (
        f"{shape.microbatches} microbatches are fewer than {shape.ranks} stages: "
        f"take at least {shape.ranks} microbatches, or {ScheduleKind.GPIPE}"
    )
    return _wrong_stages_per_rank(shape, 1) or (too_few if shape.microbatches < shape.ranks else "")


def _interleaved_refusal(shape: PipelineShape) -> str:
    rounds = max(1, shape.microbatches // shape.ranks)
    return (
        f"{shape.microbatches} microbatches do not fill {rounds} equal rounds on "
        f"{shape.ranks} ranks: take a multiple of {shape.ranks}"
        if shape.microbatches % rounds
        else ""
    )


def _zero_bubble_v_refusal(shape: PipelineShape) -> str:
    return _wrong_stages_per_rank(shape, 2)


def _wrong_stages_per_rank(shape: PipelineShape, needed: int) -> str:
    return (
        f"{shape.stages_per_rank} stages per rank, this schedule runs {needed}"
        if shape.stages_per_rank != needed
        else ""
    )


def _per_round(shape: PipelineShape) -> int:
    return microbatches_per_round(shape.ranks, shape.stages_per_rank, shape.microbatches)


SCHEDULES: Mapping[ScheduleKind, ScheduleFacts] = MappingProxyType(
    {
        ScheduleKind.GPIPE: ScheduleFacts(
            torch_class="ScheduleGPipe",
            transfer=Transfer.ON_DEMAND,
            splits_backward=False,
            has_pairs=True,
            order=lambda shape: gpipe(shape.ranks, shape.microbatches),
            in_flight=lambda _, shape: gpipe_in_flight(shape.microbatches),
            refusal=_gpipe_refusal,
        ),
        ScheduleKind.ONE_F_ONE_B: ScheduleFacts(
            torch_class="Schedule1F1B",
            transfer=Transfer.ON_DEMAND,
            splits_backward=False,
            has_pairs=False,
            order=lambda shape: one_f_one_b(shape.ranks, shape.microbatches),
            in_flight=lambda stage, shape: one_f_one_b_in_flight(
                stage, stages=shape.ranks, microbatches=shape.microbatches
            ),
            refusal=_one_f_one_b_refusal,
        ),
        ScheduleKind.INTERLEAVED_1F1B: ScheduleFacts(
            torch_class="ScheduleInterleaved1F1B",
            transfer=Transfer.OVERLAPPED,
            splits_backward=False,
            has_pairs=True,
            order=lambda shape: interleaved_1f1b(
                shape.ranks, shape.stages_per_rank, shape.microbatches
            ),
            in_flight=lambda stage, shape: interleaved_in_flight(
                stage,
                ranks=shape.ranks,
                stages_per_rank=shape.stages_per_rank,
                microbatches=shape.microbatches,
                per_round=_per_round(shape),
            ),
            refusal=_interleaved_refusal,
        ),
        ScheduleKind.INTERLEAVED_ZERO_BUBBLE: ScheduleFacts(
            torch_class="ScheduleInterleavedZeroBubble",
            transfer=Transfer.OVERLAPPED,
            splits_backward=True,
            has_pairs=True,
            order=lambda shape: interleaved_zero_bubble(
                shape.ranks, shape.stages_per_rank, shape.microbatches
            ),
            in_flight=lambda stage, shape: interleaved_zero_bubble_in_flight(
                stage,
                ranks=shape.ranks,
                stages_per_rank=shape.stages_per_rank,
                microbatches=shape.microbatches,
                per_round=_per_round(shape),
            ),
            refusal=_interleaved_refusal,
        ),
        ScheduleKind.ZERO_BUBBLE_V: ScheduleFacts(
            torch_class="ScheduleZBVZeroBubble",
            transfer=Transfer.OVERLAPPED,
            splits_backward=True,
            has_pairs=True,
            order=lambda shape: zero_bubble_v(shape.ranks, shape.microbatches),
            in_flight=lambda stage, shape: zero_bubble_v_in_flight(
                stage, ranks=shape.ranks, microbatches=shape.microbatches
            ),
            refusal=_zero_bubble_v_refusal,
        ),
    }
)
