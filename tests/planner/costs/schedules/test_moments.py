"""What a rank holds along its order, beside counts made otherwise."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.costs.schedules import table as schedule_moments
from autopar.planner.costs.schedules.orders import Action, ActionKind, PipelineShape, Schedule
from autopar.planner.costs.schedules.table import (
    SCHEDULES,
    Moments,
    ScheduleKind,
    _along_the_order,
    _most_at_once,
    in_flight,
    rank_moments,
    refusal,
    schedule_of,
)
from tests.planner.costs.schedules.orders_read import peak_deferred, peak_in_flight

SHAPES = [
    PipelineShape(ranks=ranks, stages_per_rank=local, microbatches=microbatches)
    for ranks in (1, 2, 3, 4, 6)
    for local in (1, 2, 3)
    for microbatches in (1, 4, 6, 12, 14, 30)
]


def _fullest(moments: Moments) -> set[tuple[int, ...]]:
    """Return the moments that no other exceeds in all counts while the same stage runs."""
    parts = [moments.forwarded, moments.unanswered, moments.halfway]
    rows = np.unique(np.concatenate([moments.running[:, None], *parts], axis=1), axis=0)
    return {
        tuple(row.tolist())
        for row in rows
        if not any((o[0] == row[0]) and (o >= row).all() and (o > row).any() for o in rows)
    }


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_most_of_each_stage_is_what_its_order_holds(kind: ScheduleKind) -> None:
    for shape in SHAPES:
        if shape.ranks == 1 or refusal(kind, shape):
            continue
        order = schedule_of(kind, shape)
        moments = rank_moments(kind, shape)
        rank_of = {one.stage: rank for rank, actions in enumerate(order) for one in actions}
        in_flight, deferred = peak_in_flight(order), peak_deferred(order)
        for stage, rank in rank_of.items():
            place = sorted(one for one in rank_of if rank_of[one] == rank).index(stage)
            of_rank = moments[rank]
            assert of_rank.forwarded[:, place].max() == in_flight[stage], (shape, stage)
            halfway = deferred[stage] if stage else 0  # the first makes all in the second half
            assert of_rank.halfway[:, place].max() == halfway, (shape, stage)


@pytest.mark.parametrize("kind", [kind for kind in ScheduleKind if kind is not ScheduleKind.GPIPE])
def test_more_rounds_hold_nothing_that_a_few_do_not(
    kind: ScheduleKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks, local in ((2, 1), (2, 2), (4, 2), (4, 3)):
        shape = PipelineShape(ranks=ranks, stages_per_rank=local, microbatches=7 * ranks)
        if refusal(kind, shape):
            continue
        few = rank_moments(kind, shape)
        with monkeypatch.context() as patched:
            patched.setattr(schedule_moments, "with_enough_rounds", lambda _, shape: shape)
            many = rank_moments(kind, shape)
        assert list(map(_fullest, few)) == list(map(_fullest, many)), shape


def all_forwards_first(shape: PipelineShape) -> Schedule:
    """Return the order of torch's ScheduleLoopedBFS: each stage runs all microbatches in turn."""
    numbers = range(shape.microbatches)
    return tuple(
        (
            *(Action(one, ActionKind.FORWARD, mb) for one in own for mb in numbers),
            *(Action(one, ActionKind.BACKWARD, mb) for one in own[::-1] for mb in numbers[::-1]),
        )
        for rank in range(shape.ranks)
        for own in (range(rank, shape.stages, shape.ranks),)
    )


def _forget() -> None:
    """Forget what is remembered of orders."""
    for memo in (_most_at_once, _along_the_order, schedule_of, in_flight):
        memo.cache_clear()


def test_a_schedule_that_holds_more_with_each_round_is_counted_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = ScheduleKind.INTERLEAVED_1F1B
    row = replace(SCHEDULES[kind], order=all_forwards_first)
    shape = PipelineShape(ranks=2, stages_per_rank=2, microbatches=34)
    with monkeypatch.context() as patched:
        patched.setattr(schedule_moments, "SCHEDULES", {**SCHEDULES, kind: row})
        _forget()
        moments = rank_moments(kind, shape)
    _forget()
    assert [one.forwarded.max(axis=0).tolist() for one in moments] == [[34, 34], [34, 34]]


def test_a_v_of_two_ranks_is_as_worked_out_by_hand() -> None:
    # Rank 0, stages 0 and 3: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1, then the first 0I0 (nothing) 0W0.
    shape = PipelineShape(ranks=2, stages_per_rank=2, microbatches=8)
    first = rank_moments(ScheduleKind.ZERO_BUBBLE_V, shape)[0]
    assert first.running[:4].tolist() == [1, 1, 1, 1]
    assert first.forwarded[0].tolist() == [3, 1]
    assert first.halfway[:2].tolist() == [[0, 1], [0, 1]]
