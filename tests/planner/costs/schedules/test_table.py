"""The table of schedules answers for every kind."""

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autopar.planner.costs.schedules.orders import ActionKind, PipelineShape
from autopar.planner.costs.schedules.simulation import Transfer
from autopar.planner.costs.schedules.table import (
    SCHEDULES,
    ScheduleKind,
    rank_of,
    refusal,
    schedule_of,
)
from autopar.planner.errors import InputError
from autopar.runtime.pipeline.schedules import KINDS, stage_indices

SHAPES = [
    PipelineShape(ranks=ranks, stages_per_rank=local, microbatches=microbatches)
    for ranks in range(1, 9)
    for local in (1, 2, 3)
    for microbatches in (1, 2, 3, 6, 8, 12, 14, 16, 24)
]


def test_the_table_has_every_kind() -> None:
    assert set(SCHEDULES) == set(ScheduleKind)


def test_the_runtime_has_a_class_of_torch_for_every_kind() -> None:
    assert set(KINDS) == set(ScheduleKind)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_runtime_puts_stages_where_the_order_runs_them(kind: ScheduleKind) -> None:
    for shape in SHAPES:
        if refusal(kind, shape):
            continue
        for rank, actions in enumerate(schedule_of(kind, shape)):
            own = stage_indices(kind, rank, shape.ranks, shape.stages_per_rank)
            assert own == tuple(sorted({action.stage for action in actions})), shape
            assert {rank_of(kind, stage, shape.ranks) for stage in own} == {rank}, shape


@pytest.mark.parametrize("kind", ScheduleKind)
def test_one_stage_per_rank_is_received_on_demand(kind: ScheduleKind) -> None:
    is_single = issubclass(KINDS[kind].torch_class, PipelineScheduleSingle)
    assert (SCHEDULES[kind].stages_per_rank == 1) == is_single
    assert (SCHEDULES[kind].transfer is Transfer.ON_DEMAND) == is_single
    assert kind.has_closed_form <= is_single


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_backward_is_split_where_the_table_says_so(kind: ScheduleKind) -> None:
    shape = next(shape for shape in SHAPES if shape.ranks == 2 and not refusal(kind, shape))
    kinds = {action.kind for actions in schedule_of(kind, shape) for action in actions}
    is_split = ActionKind.WEIGHT_GRADIENT in kinds
    assert is_split == SCHEDULES[kind].splits_backward == KINDS[kind].splits_backward


def test_a_refused_shape_raises_with_the_reason() -> None:
    shape = PipelineShape(ranks=2, stages_per_rank=1, microbatches=4)
    with pytest.raises(InputError, match="1 stages per rank, this schedule runs 2"):
        schedule_of(ScheduleKind.ZERO_BUBBLE_V, shape)
