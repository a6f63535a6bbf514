"""Counts what a rank of a pipeline holds at each moment, along the order of its actions.

Stages of one rank peak at different times, so their peaks do not add up. A rank computes one action
at a time; what it holds meanwhile follows from its order alone, whatever the actions cost. A
forward that leaves more than before is followed by another, or by a backward that finds all of it
there, so the fullest moment lies within a backward, or within half of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.orders import Action, ActionKind, columns_of
from autopar.planner.costs.schedules.table import (
    SCHEDULES,
    PipelineShape,
    ScheduleKind,
    in_flight_microbatches,
    schedule_of,
    settled,
)

_ANSWERS = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
_RELEASES = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)

Counts = npt.NDArray[np.int64]  # a row for each moment, a column for each stage of the rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moments:
    """A rank within each backward, and each half of one: the microbatches that it holds then.

    A stage whose backward is not split, though the schedule would, makes all its gradients in the
    first half and holds only what is unanswered.
    """

    running: npt.NDArray[np.int64]  # which of its stages, in their order in the model
    forwarded: Counts  # and not done with, the running one included
    unanswered: Counts  # of these, the ones whose inputs had no gradient before
    halfway: Counts  # the ones in the first half of their backward, or between both

    def __post_init__(self) -> None:
        """Let nobody write to the counts: moments are remembered."""
        for counts in (self.running, self.forwarded, self.unanswered, self.halfway):
            counts.flags.writeable = False

    @property
    def key(self) -> bytes:
        """What tells moments apart."""
        every = (self.running, self.forwarded, self.unanswered, self.halfway)
        return b"/".join(one.tobytes() for one in every)


def rank_moments(kind: ScheduleKind, shape: PipelineShape) -> tuple[Moments, ...]:
    """Return the moments of each rank; of one stage per rank, where enough, only the fullest."""
    if shape.ranks == 1:
        return (_at_once(1),) * shape.stages
    if shape.stages_per_rank == 1 and not SCHEDULES[kind].splits_backward:
        held = (in_flight_microbatches(kind, stage, shape) for stage in range(shape.stages))
        return tuple(map(_at_once, held))
    return _along_the_order(kind, settled(shape))


def _at_once(microbatches: int) -> Moments:
    held = np.array([[microbatches]])
    nothing = np.zeros_like(held)
    return Moments(running=nothing[0], forwarded=held, unanswered=held, halfway=nothing)


@lru_cache(maxsize=256)
def _along_the_order(kind: ScheduleKind, shape: PipelineShape) -> tuple[Moments, ...]:
    return tuple(map(_moments, schedule_of(kind, shape)))


def _moments(actions: Sequence[Action]) -> Moments:
    """Count along one rank's order.

    The first stage makes all its gradients in the second half, for its inputs need none.
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
    """Return which actions are of some kinds, as a column."""
    places = [place for place, kind in enumerate(ActionKind) if kind in wanted]
    return np.isin(kinds, places)[:, None]


def _before(done: Counts) -> Counts:
    """Return how many were done before each action."""
    counted: Counts = np.cumsum(done, axis=0) - done
    return counted
