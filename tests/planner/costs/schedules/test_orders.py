"""Our schedules are torch's, action by action."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.planner.costs.schedules.orders import (
    PipelineShape,
    interleaved_zero_bubble,
    one_f_one_b,
)
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, refusal, schedule_of
from autopar.planner.errors import InputError
from autopar.runtime.pipeline.schedules import KINDS
from tests.planner.costs.schedules.orders_read import format_schedule, shape_of

SINGLE = [kind for kind in ScheduleKind if SCHEDULES[kind].stages_per_rank == 1]
MULTI = [kind for kind in ScheduleKind if kind not in SINGLE]


class RecordingStage:
    """Stands where torch has a stage and writes down what it is asked to compute."""

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.ran: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.ran.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.ran.append(f"{self.stage_index}B{microbatch}")

    def no_transfers(self, _: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, _: int) -> None:
        pass

    release_fwd_send_outputs = perform_reduce_grad  # asked for by torch 2.15


def single_order_in_torch(kind: ScheduleKind, shape: PipelineShape) -> str:
    """Return what torch's loop runs, rank by rank, without a process group.

    The loop itself and not `_get_pipeline_order`, whose text for the last rank of 1F1B counts
    forwards from 1 (torch 2.13).
    """
    torch_class: Any = KINDS[kind].torch_class
    lines = []
    for rank in range(shape.ranks):
        stage = RecordingStage(rank, shape.ranks)
        schedule = torch_class(stage, shape.microbatches)
        schedule._initialize_stage = lambda *_: None
        schedule._maybe_compute_loss = schedule._update_losses = lambda *_: None
        schedule._maybe_get_loss = lambda *_: None
        schedule._step_microbatches()
        lines.append(" ".join(stage.ran))
    return "\n".join(lines)


def multi_order_in_torch(kind: ScheduleKind, shape: PipelineShape) -> str:
    """Return what torch's runtime executes, without its transfers and other bookkeeping."""
    torch_class: Any = KINDS[kind].torch_class
    stages = [
        SimpleNamespace(
            num_stages=shape.stages,
            group_size=shape.ranks,
            group_rank=0,
            submod=torch.nn.Identity(),
        )
        for _ in range(shape.stages_per_rank)
    ]
    order = torch_class(stages, shape.microbatches).pipeline_order_with_comms
    return "\n".join(
        " ".join(str(action) for action in order[rank] if action.is_compute_op)
        for rank in range(shape.ranks)
    )


def shapes(stages_per_rank: tuple[int, ...]) -> list[PipelineShape]:
    return [
        PipelineShape(ranks=ranks, stages_per_rank=local, microbatches=microbatches)
        for ranks in (1, 2, 3, 4, 7, 8)
        for local in stages_per_rank
        for microbatches in (1, 2, 3, 4, 5, 8, 10, 12, 16, 21, 32)
    ]


@pytest.mark.parametrize("kind", SINGLE)
def test_schedules_of_one_stage_per_rank_are_what_torch_runs(kind: ScheduleKind) -> None:
    runnable = [shape for shape in shapes((1,)) if not refusal(kind, shape)]
    assert len(runnable) > 30
    for shape in runnable:
        ours = format_schedule(schedule_of(kind, shape))
        assert ours == single_order_in_torch(kind, shape), shape


@pytest.mark.parametrize("kind", MULTI)
def test_schedules_of_several_stages_per_rank_are_what_torch_runs(kind: ScheduleKind) -> None:
    runnable = [shape for shape in shapes((1, 2, 3)) if not refusal(kind, shape)]
    assert len(runnable) > 30
    for shape in runnable:
        ours = format_schedule(schedule_of(kind, shape))
        assert ours == multi_order_in_torch(kind, shape), shape


@pytest.mark.parametrize("kind", MULTI)
def test_torch_refuses_what_we_refuse(kind: ScheduleKind) -> None:
    refused = [shape for shape in shapes((1, 2, 3)) if refusal(kind, shape)]
    assert refused
    for shape in refused:
        with pytest.raises(ValueError, match="requires"):
            multi_order_in_torch(kind, shape)


def test_torch_refuses_1f1b_on_fewer_microbatches_than_stages() -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=3)
    assert "take at least 4 microbatches" in refusal(ScheduleKind.ONE_F_ONE_B, shape)
    with pytest.raises(ValueError, match="must be greater"):
        single_order_in_torch(ScheduleKind.ONE_F_ONE_B, shape)


def test_1f1b_of_fewer_microbatches_than_stages_is_still_built() -> None:
    assert format_schedule(one_f_one_b(shape_of(3, 1))) == "0F0 0B0\n1F0 1B0\n2F0 2B0"


def test_weight_gradients_come_as_many_actions_late_as_the_rank_is_deep() -> None:
    # rank 0 at once; rank 1 keeps one back and ends on it
    assert format_schedule(interleaved_zero_bubble(shape_of(2, 2))) == (
        "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1"
    )


def test_microbatches_that_leave_a_round_half_full_are_refused() -> None:
    with pytest.raises(InputError, match="5 microbatches do not fill 2 equal rounds"):
        schedule_of(ScheduleKind.INTERLEAVED_1F1B, shape_of(2, 5, 2))


def test_a_count_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="0 microbatches"):
        shape_of(2, 0)
