"""Counts the microbatches that a pipeline rank holds at each moment of its order.

Stages of one rank have their peaks at different times, so their peaks do not add up. A rank
computes one action at a time. What it holds follows from the order of actions alone, not from their
costs. A forward that increases memory is followed by another forward, or by a backward that starts
with the same memory. So the peak is within a backward, or within half of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.orders import (
    Action,
    ActionKind,
    PipelineShape,
    Schedule,
    columns_of,
    settled,
)
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, schedule_of

_ANSWERS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
_RELEASES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)

Counts = npt.NDArray[np.int64]  # a row for each moment, a column for each stage of the rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """The microbatches that a rank holds within each backward, or half of one.

    If the schedule splits backwards, but that of a stage cannot be split, the first half computes
    all its gradients. Such a stage holds only the `unanswered` microbatches.
    """

    running: npt.NDArray[np.int64]  # the index of the running stage, among the rank's stages
    # microbatches whose forward is done and whose backward is not, including the running one
    forwarded: Counts
    unanswered: Counts  # of these, the microbatches whose inputs have no gradient yet
    halfway: Counts  # of these, the ones in the first half of their backward or between the halves

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
    """Return the most microbatches that each stage holds activations of at once.

    A microbatch is in flight on a stage from its forward until its backward ends, or its weight
    gradient if the backward is split: torch keeps the whole graph between the two halves, and the
    output gradients of ops with weights (deferred). A stage that still holds every microbatch of a
    few rounds, as with GPipe, may hold more in a longer schedule, which is then counted whole.
    """
    if shape.ranks == 1:
        return (1,) * shape.stages  # one rank runs one microbatch after the other
    few, order = settled(shape), SCHEDULES[kind].order
    held = _most_at_once(order(few), shape.stages)
    is_settled = few == shape or max(held) < few.microbatches
    return held if is_settled else _most_at_once(order(shape), shape.stages)


def _most_at_once(schedule: Schedule, stages: int) -> tuple[int, ...]:
    held, most = [0] * stages, [0] * stages
    for stage, kind, _ in chain.from_iterable(schedule):
        if kind is ActionKind.FORWARD:
            held[stage] += 1
            if held[stage] > most[stage]:
                most[stage] = held[stage]
        elif kind is not ActionKind.INPUT_GRADIENT:
            held[stage] -= 1
    return tuple(most)


def rank_moments(kind: ScheduleKind, shape: PipelineShape) -> tuple[Moments, ...]:
    """Return the moments of each rank.

    If a rank has one stage, and the backward is not split, the fullest moment suffices.
    """
    is_one_peak = shape.stages_per_rank == 1 and not SCHEDULES[kind].splits_backward
    if shape.ranks == 1 or is_one_peak:
        return tuple(map(_at_once, in_flight(kind, shape)))
    return _along_the_order(kind, settled(shape))


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
