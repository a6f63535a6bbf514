"""The table of pipeline schedules: their orders, requirements, transfers and groups."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

from autopar.planner.costs.schedules.orders import (
    PipelineShape,
    Schedule,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zero_bubble_v,
)
from autopar.planner.costs.schedules.simulation import Transfer
from autopar.planner.errors import InputError


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


def _whenever(_: PipelineShape) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The facts about one schedule that its order does not tell."""

    order: Callable[[PipelineShape], Schedule]
    stages_per_rank: int | None = None  # the only number that torch runs
    # as in torch: with one stage per rank, a tensor is received only when it is needed
    transfer: Transfer
    splits_backward: bool
    # neighbours have process groups of their own, so that no message blocks another
    has_pairs: bool = True
    refusal: Callable[[PipelineShape], str] = _whenever  # for its number of microbatches


@lru_cache(maxsize=2)  # one schedule is used twice: for its moments, and to simulate it
def schedule_of(kind: ScheduleKind, shape: PipelineShape) -> Schedule:
    """Return the actions of each rank; raises InputError if torch does not run such a schedule."""
    refused = refusal(kind, shape)
    if refused:
        raise InputError(refused, where=f"pipeline schedule {kind}")
    return SCHEDULES[kind].order(shape)


def refusal(kind: ScheduleKind, shape: PipelineShape) -> str:
    """Return why torch does not run this schedule in this shape, or ""."""
    facts = SCHEDULES[kind]
    if facts.stages_per_rank not in (None, shape.stages_per_rank):
        return (
            f"{shape.stages_per_rank} stages per rank, this schedule runs {facts.stages_per_rank}"
        )
    return facts.refusal(shape)


def rank_of(kind: ScheduleKind, stage: int, ranks: int) -> int:
    """Return the rank of a stage: round robin, or down and up again for a V."""
    return _ranks(kind, ranks, stage // ranks + 1)[stage]


@lru_cache(maxsize=256)
def _ranks(kind: ScheduleKind, ranks: int, stages_per_rank: int) -> Mapping[int, int]:
    """Return the rank of each stage, from the order of one microbatch."""
    shape = PipelineShape(ranks=ranks, stages_per_rank=stages_per_rank, microbatches=1)
    every = enumerate(SCHEDULES[kind].order(shape))
    return MappingProxyType({one.stage: rank for rank, actions in every for one in actions})


def _too_few_microbatches(shape: PipelineShape) -> str:
    return (
        f"{shape.microbatches} microbatches are fewer than {shape.ranks} stages: "
        f"take at least {shape.ranks} microbatches, or {ScheduleKind.GPIPE}"
        if shape.microbatches < shape.ranks
        else ""
    )


def _uneven_rounds(shape: PipelineShape) -> str:
    return (
        f"{shape.microbatches} microbatches do not fill {shape.rounds} equal rounds on "
        f"{shape.ranks} ranks: take a multiple of {shape.ranks}"
        if shape.microbatches % shape.rounds
        else ""
    )


SCHEDULES: Mapping[ScheduleKind, ScheduleFacts] = MappingProxyType(
    {
        ScheduleKind.GPIPE: ScheduleFacts(
            order=gpipe,
            stages_per_rank=1,
            transfer=Transfer.ON_DEMAND,
            splits_backward=False,
        ),
        ScheduleKind.ONE_F_ONE_B: ScheduleFacts(
            order=one_f_one_b,
            stages_per_rank=1,
            transfer=Transfer.ON_DEMAND,
            splits_backward=False,
            has_pairs=False,
            refusal=_too_few_microbatches,
        ),
        ScheduleKind.INTERLEAVED_1F1B: ScheduleFacts(
            order=interleaved_1f1b,
            transfer=Transfer.OVERLAPPED,
            splits_backward=False,
            refusal=_uneven_rounds,
        ),
        ScheduleKind.INTERLEAVED_ZERO_BUBBLE: ScheduleFacts(
            order=interleaved_zero_bubble,
            transfer=Transfer.OVERLAPPED,
            splits_backward=True,
            refusal=_uneven_rounds,
        ),
        ScheduleKind.ZERO_BUBBLE_V: ScheduleFacts(
            order=zero_bubble_v,
            stages_per_rank=2,
            transfer=Transfer.OVERLAPPED,
            splits_backward=True,
        ),
    }
)
