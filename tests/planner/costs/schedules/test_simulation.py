"""The simulation equals what can be worked out otherwise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.costs.schedules.orders import (
    Action,
    PipelineShape,
    interleaved_zero_bubble,
    one_f_one_b,
    zero_bubble_v,
)
from autopar.planner.costs.schedules.simulation import (
    Simulation,
    StageSeconds,
    Transfer,
)
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, refusal, schedule_of
from autopar.planner.errors import InputError
from tests.cells import examples
from tests.clock import least_seconds
from tests.planner.costs.schedules.equal_stages import even_stages, simulate
from tests.planner.costs.schedules.orders_read import parse_schedule, shape_of

SECONDS = st.floats(0.001, 10.0)
STAGE = st.tuples(SECONDS, SECONDS, SECONDS).map(
    lambda three: StageSeconds(
        forward_seconds=three[0],
        backward_seconds=three[1] + three[2],
        input_gradient_seconds=three[1],
        weight_gradient_seconds=three[2],
    )
)
TRANSFERS = st.sampled_from(Transfer)


@st.composite
def pipelines(
    draw: st.DrawFn,
) -> tuple[ScheduleKind, PipelineShape, list[StageSeconds], list[float]]:
    """Draw a schedule that torch runs, with uneven stages and transfers."""
    kind = draw(st.sampled_from(ScheduleKind))
    shape = draw(
        st.builds(
            PipelineShape,
            ranks=st.integers(1, 5),
            stages_per_rank=st.integers(1, 3),
            microbatches=st.integers(1, 12),
        ).filter(lambda shape: not refusal(kind, shape))
    )
    stages = draw(st.lists(STAGE, min_size=shape.stages, max_size=shape.stages))
    transfers = st.lists(st.floats(0.0, 3.0), min_size=shape.stages - 1, max_size=shape.stages - 1)
    return kind, shape, stages, draw(transfers)


def stage(forward: float, backward: float) -> StageSeconds:
    return StageSeconds(
        forward_seconds=forward,
        backward_seconds=backward,
        input_gradient_seconds=backward / 2,
        weight_gradient_seconds=backward / 2,
    )


def seconds_of(action: Action, stages: list[StageSeconds]) -> float:
    own = stages[action.stage]
    return {
        "F": own.forward_seconds,
        "B": own.backward_seconds,
        "I": own.input_gradient_seconds,
        "W": own.weight_gradient_seconds,
    }[str(action.kind)]


def two_stages(transfer: Transfer) -> Simulation:
    return simulate(
        one_f_one_b(shape_of(2, 2)),
        [stage(1, 2), stage(2, 3)],
        transfer_seconds=(0.5,),
        transfer=transfer,
    )


def test_overlapped_transfers_by_hand() -> None:
    # rank 0: F0 0-1, F1 1-2, B0 7-9, B1 12-14      its gradients arrive at 6.5 + .5 and 11.5 + .5
    # rank 1: F0 1.5-3.5, B0 3.5-6.5, F1 6.5-8.5 (arrived at 2.5), B1 8.5-11.5
    result = two_stages(Transfer.OVERLAPPED)
    assert result.starts_seconds == ((0, 1, 7, 12), (1.5, 3.5, 6.5, 8.5))
    assert result.ends_seconds == ((1, 2, 9, 14), (3.5, 6.5, 8.5, 11.5))
    assert result.step_seconds == 14
    assert result.idle_seconds == (14 - 2 * 3, 14 - 2 * 5)


def test_transfers_on_demand_by_hand() -> None:
    # as above, but rank 1 asks for microbatch 1 when it is free at 6.5, so all after it is .5 later
    result = two_stages(Transfer.ON_DEMAND)
    assert result.starts_seconds == ((0, 1, 7, 12.5), (1.5, 3.5, 7, 9))
    assert result.step_seconds == 14.5


def test_the_two_stages_at_the_turn_of_a_v_need_no_transfer() -> None:
    # one rank runs F, I and W of both stages, 1 s each, whatever a transfer would take
    stages = even_stages(2, forward_seconds=1, input_gradient_seconds=1, weight_gradient_seconds=1)
    for transfer in Transfer:
        result = simulate(
            zero_bubble_v(shape_of(1, 1)), stages, transfer_seconds=(9,), transfer=transfer
        )
        assert result.step_seconds == 6


@settings(max_examples=examples(150))
@given(pipelines(), TRANSFERS)
def test_a_step_takes_at_least_the_work_of_any_rank(
    pipeline: tuple[ScheduleKind, PipelineShape, list[StageSeconds], list[float]],
    transfer: Transfer,
) -> None:
    kind, shape, stages, transfers = pipeline
    schedule = schedule_of(kind, shape)
    result = simulate(schedule, stages, transfer_seconds=transfers, transfer=transfer)
    for rank, actions in enumerate(schedule):
        work = sum(seconds_of(action, stages) for action in actions)
        assert result.idle_seconds[rank] == pytest.approx(result.step_seconds - work)
        assert result.idle_seconds[rank] >= -1e-9


@settings(max_examples=examples(150))
@given(pipelines(), TRANSFERS)
def test_a_step_takes_at_least_one_microbatch_through_all_stages_and_back(
    pipeline: tuple[ScheduleKind, PipelineShape, list[StageSeconds], list[float]],
    transfer: Transfer,
) -> None:
    kind, shape, stages, transfers = pipeline
    result = simulate(
        schedule_of(kind, shape), stages, transfer_seconds=transfers, transfer=transfer
    )
    split = SCHEDULES[kind].splits_backward
    path = sum(
        one.forward_seconds + (one.input_gradient_seconds if split else one.backward_seconds)
        for one in stages
    )
    turn = shape.ranks - 1 if kind is ScheduleKind.ZERO_BUBBLE_V else None
    between_ranks = [] if shape.ranks == 1 else transfers
    path += 2 * sum(seconds for at, seconds in enumerate(between_ranks) if at != turn)
    assert result.step_seconds >= path - 1e-9


@settings(max_examples=examples(150))
@given(pipelines(), TRANSFERS)
def test_every_action_follows_its_rank_and_its_inputs(
    pipeline: tuple[ScheduleKind, PipelineShape, list[StageSeconds], list[float]],
    transfer: Transfer,
) -> None:
    kind, shape, stages, transfers = pipeline
    schedule = schedule_of(kind, shape)
    result = simulate(schedule, stages, transfer_seconds=transfers, transfer=transfer)
    end_of: dict[str, float] = {}
    for actions, starts, ends in zip(
        schedule, result.starts_seconds, result.ends_seconds, strict=True
    ):
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        for action, start, end in zip(actions, starts, ends, strict=True):
            assert end == pytest.approx(start + seconds_of(action, stages))
            end_of[str(action)] = end
    for actions, starts in zip(schedule, result.starts_seconds, strict=True):
        for action, start in zip(actions, starts, strict=True):
            at, mb = action.stage, action.microbatch
            if str(action.kind) == "F" and at > 0:
                assert start >= end_of[f"{at - 1}F{mb}"]
            if str(action.kind) in "BI" and at < shape.stages - 1:
                assert start >= end_of[f"{at + 1}{action.kind}{mb}"]


@settings(max_examples=examples(100))
@given(st.integers(1, 6), st.integers(1, 4), SECONDS, SECONDS, SECONDS, st.floats(0.0, 2.0))
def test_zero_bubble_is_never_slower_than_1f1b_on_equal_stages(
    ranks: int, rounds: int, forward: float, gradient: float, weight: float, transfer: float
) -> None:
    stages = even_stages(
        ranks,
        forward_seconds=forward,
        input_gradient_seconds=gradient,
        weight_gradient_seconds=weight,
    )
    zero_bubble, plain = (
        simulate(
            order, stages, transfer_seconds=[transfer] * (ranks - 1), transfer=Transfer.OVERLAPPED
        ).step_seconds
        for order in (
            interleaved_zero_bubble(shape_of(ranks, ranks * rounds)),
            one_f_one_b(shape_of(ranks, ranks * rounds)),
        )
    )
    assert zero_bubble <= plain + 1e-9


def test_a_v_of_equal_thirds_idles_for_one_forward_per_rank_but_the_first() -> None:
    # f = i = w = 1: only the way in is empty, p − 1 forwards; the work is 2 stages × 3 × m
    stages = even_stages(8, forward_seconds=1, input_gradient_seconds=1, weight_gradient_seconds=1)
    result = simulate(
        zero_bubble_v(shape_of(4, 8)),
        stages,
        transfer_seconds=[0] * 7,
        transfer=Transfer.OVERLAPPED,
    )
    assert result.step_seconds == 2 * 3 * 8 + 3


def test_a_deadlock_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(InputError, match="waits for ever at 0B0"):
        simulate(
            parse_schedule("0B0 0F0\n1F0 1B0"),
            [stage(1, 1)] * 2,
            transfer_seconds=(0,),
            transfer=Transfer.OVERLAPPED,
        )


@pytest.mark.parametrize(("stages", "transfers"), [(3, 1), (2, 2), (1, 0)])
def test_figures_for_other_stages_than_scheduled_are_refused(stages: int, transfers: int) -> None:
    with pytest.raises(AssertionError):
        simulate(
            one_f_one_b(shape_of(2, 2)),
            [stage(1, 1)] * stages,
            transfer_seconds=[0.0] * transfers,
            transfer=Transfer.OVERLAPPED,
        )


def test_sixteen_stages_of_128_microbatches_are_simulated_in_under_20_ms() -> None:
    schedule = interleaved_zero_bubble(shape_of(16, 128))
    stages = even_stages(16, forward_seconds=1, input_gradient_seconds=1, weight_gradient_seconds=1)
    taken_seconds = least_seconds(
        lambda: simulate(
            schedule, stages, transfer_seconds=[0.1] * 15, transfer=Transfer.OVERLAPPED
        )
    )
    assert taken_seconds < 0.020
