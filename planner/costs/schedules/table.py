"""The table of pipeline schedules: orders, requirements, transfers, microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.orders import (
    Action,
    ActionKind,
    PipelineShape,
    Schedule,
    columns_of,
    few_rounds,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFacts:
    """The order of a schedule, and facts that the order does not show."""

    order: Callable[[PipelineShape], Schedule]
    stages_per_rank: int | None = None  # the only number with which torch runs it; None: any
    # as in torch: with one stage per rank, a tensor is received only when it is needed
    transfer: Transfer
    splits_backward: bool = False
    # neighbours have process groups of their own, so that no message blocks another
    has_pairs: bool = True
    refusal: Callable[[PipelineShape], str] = lambda _: ""  # why torch refuses a shape, or ""


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
def stage_ranks(kind: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    """Return the rank of each stage."""
    return tuple(rank_of(kind, stage, shape.ranks) for stage in range(shape.stages))


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
        ),
        ScheduleKind.ONE_F_ONE_B: ScheduleFacts(
            order=one_f_one_b,
            stages_per_rank=1,
            transfer=Transfer.ON_DEMAND,
            has_pairs=False,
            refusal=_too_few_microbatches,
        ),
        ScheduleKind.INTERLEAVED_1F1B: ScheduleFacts(
            order=interleaved_1f1b,
            transfer=Transfer.OVERLAPPED,
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


_ANSWERS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)  # after these, inputs have gradients
_RELEASES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)  # after these, nothing is held

Counts = npt.NDArray[np.int64]  # a row for each moment, a column for each stage of the rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """The microbatches that a rank holds at each moment: during a backward, or half of one.

    A schedule may split backwards. If the backward of a stage cannot be split, its first half
    computes all gradients, so the stage holds only the `unanswered` microbatches.
    """

    running: npt.NDArray[np.int64]  # the index of the running stage, among the rank's stages
    # microbatches whose forward is done and whose backward is not, including the running one
    forwarded: Counts
    unanswered: Counts  # of the forwarded, those whose inputs have no gradient yet
    halfway: Counts  # of the forwarded, those in a half of their backward or between halves

    def __post_init__(self) -> None:
        """Make the counts read-only, because moments are cached."""
        for counts in (self.running, self.forwarded, self.unanswered, self.halfway):
            counts.flags.writeable = False

    @property
    def key(self) -> bytes:
        """A key that is equal for equal moments."""
        every = (self.running, self.forwarded, self.unanswered, self.halfway)
        return b"/".join(one.tobytes() for one in every)


@lru_cache(maxsize=4096)
def in_flight(kind: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    """Return the most microbatches whose activations each stage holds at once.

    A microbatch is in flight on a stage from its forward until its backward ends. If the backward
    is split, this is the end of its second half, the weight gradients: until then torch keeps the
    whole graph, and the output gradients of ops with weights (the deferred bytes).
    """
    if shape.ranks == 1:
        return (1,) * shape.stages  # one rank runs one microbatch after the other
    return _most_at_once(kind, with_enough_rounds(kind, shape))


def with_enough_rounds(kind: ScheduleKind, shape: PipelineShape) -> PipelineShape:
    """Return the shape with few rounds, if one more round does not make its stages hold more.

    If it does, as with GPipe, return the given shape.
    """
    few = few_rounds(shape)
    if few == shape:
        return shape
    more = replace(few, microbatches=few.microbatches + shape.ranks)
    return few if _most_at_once(kind, few) == _most_at_once(kind, more) else shape


@lru_cache(maxsize=4096)
def _most_at_once(kind: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    held, most = [0] * shape.stages, [0] * shape.stages
    for stage, action, _ in chain.from_iterable(SCHEDULES[kind].order(shape)):
        if action is ActionKind.FORWARD:
            held[stage] += 1
            if held[stage] > most[stage]:
                most[stage] = held[stage]
        elif action is not ActionKind.INPUT_GRADIENT:
            held[stage] -= 1
    return tuple(most)


@lru_cache(maxsize=256)
def forwards_first(kind: ScheduleKind, shape: PipelineShape) -> tuple[int, ...]:
    """Return how many forwards each rank runs before its first backward."""
    passes = ([one.kind for one in actions] for actions in SCHEDULES[kind].order(shape))
    return tuple(
        next(place for place, one in enumerate(own) if one is not ActionKind.FORWARD)
        for own in passes
    )


def rank_moments(kind: ScheduleKind, shape: PipelineShape) -> tuple[Moments, ...]:
    """Return the moments of each rank.

    The fullest one suffices for a lone rank, and for ranks with one stage and whole backwards.
    """
    is_one_peak = shape.stages_per_rank == 1 and not SCHEDULES[kind].splits_backward
    if shape.ranks == 1 or is_one_peak:
        return tuple(map(_at_once, in_flight(kind, shape)))
    return _along_the_order(kind, with_enough_rounds(kind, shape))


def _at_once(microbatches: int) -> Moments:
    held = np.array([[microbatches]])
    nothing = np.zeros_like(held)
    return Moments(running=nothing[0], forwarded=held, unanswered=held, halfway=nothing)


@lru_cache(maxsize=256)
def _along_the_order(kind: ScheduleKind, shape: PipelineShape) -> tuple[Moments, ...]:
    return tuple(map(_moments, schedule_of(kind, shape)))


def _moments(actions: Sequence[Action]) -> Moments:
    """Return the moments of one rank's order.

    The first stage computes all gradients in the second half, because its inputs need none.
    """
    stage, kind, _ = columns_of(actions)
    of_stage = (stage[:, None] == np.unique(stage)).astype(np.int64)
    forwards = of_stage * _are(kind, ActionKind.FORWARD)
    releases = of_stage * _are(kind, *_RELEASES)
    answers = np.where(stage[:, None] == 0, releases, of_stage * _are(kind, *_ANSWERS))
    forwarded = np.cumsum(forwards, axis=0) - _before(releases)
    unanswered = np.cumsum(forwards, axis=0) - _before(answers)
    halfway = np.cumsum(answers * (1 - releases), axis=0) - _before(releases * (1 - answers))
    rows = np.flatnonzero((answers | releases).any(axis=1))
    return Moments(
        running=(answers | releases)[rows].argmax(axis=1),
        forwarded=forwarded[rows],
        unanswered=unanswered[rows],
        halfway=halfway[rows],
    )


def _are(kinds: Counts, *wanted: ActionKind) -> npt.NDArray[np.bool_]:
    """Return which actions are of these kinds, as a column."""
    places = [place for place, kind in enumerate(ActionKind) if kind in wanted]
    return np.isin(kinds, places)[:, None]


def _before(done: Counts) -> Counts:
    """Return how many were done before each action."""
    counted: Counts = np.cumsum(done, axis=0) - done
    return counted
