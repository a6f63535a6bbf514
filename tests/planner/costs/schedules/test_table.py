"""The table of schedules answers for every kind."""

import pytest
from torch.distributed import pipelining

from autopar.planner.costs.schedules.orders import ActionKind
from autopar.planner.costs.schedules.table import (
    SCHEDULES,
    PipelineShape,
    ScheduleKind,
    in_flight_microbatches,
    refusal,
    schedule_of,
)
from autopar.planner.errors import InputError
from tests.planner.costs.schedules.orders_read import peak_in_flight
from tests.planner.costs.schedules.schedule_faults import require_valid

SHAPES = [
    PipelineShape(ranks=ranks, stages_per_rank=local, microbatches=microbatches)
    for ranks in range(1, 9)
    for local in (1, 2, 3)
    for microbatches in (1, 2, 3, 6, 8, 12, 14, 16, 24)
]


def test_the_table_has_every_kind() -> None:
    assert set(SCHEDULES) == set(ScheduleKind)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_torch_has_the_class_of_the_table(kind: ScheduleKind) -> None:
    assert hasattr(pipelining, SCHEDULES[kind].torch_class) or hasattr(
        pipelining.schedules, SCHEDULES[kind].torch_class
    )


@pytest.mark.parametrize("kind", ScheduleKind)
def test_every_schedule_that_is_not_refused_is_valid(kind: ScheduleKind) -> None:
    for shape in SHAPES:
        if not refusal(kind, shape):
            schedule = schedule_of(kind, shape)
            require_valid(schedule, stages=shape.stages, microbatches=shape.microbatches)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_closed_form_of_in_flight_microbatches_is_what_the_order_holds(
    kind: ScheduleKind,
) -> None:
    for shape in SHAPES:
        if not refusal(kind, shape):
            closed = tuple(in_flight_microbatches(kind, s, shape) for s in range(shape.stages))
            assert closed == peak_in_flight(schedule_of(kind, shape)), shape


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_backward_is_split_where_the_table_says_so(kind: ScheduleKind) -> None:
    shape = next(shape for shape in SHAPES if shape.ranks == 2 and not refusal(kind, shape))
    kinds = {action.kind for actions in schedule_of(kind, shape) for action in actions}
    assert (ActionKind.WEIGHT_GRADIENT in kinds) == SCHEDULES[kind].splits_backward


def test_a_refused_shape_raises_with_the_reason() -> None:
    shape = PipelineShape(ranks=2, stages_per_rank=1, microbatches=4)
    with pytest.raises(InputError, match="1 stages per rank, this schedule runs 2"):
        schedule_of(ScheduleKind.ZERO_BUBBLE_V, shape)
