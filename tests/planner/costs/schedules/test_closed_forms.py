"""Closed forms equal the simulation where they claim to, and bounds hold."""

import random
from collections.abc import Sequence
from statistics import median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.costs.schedules.orders import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
)
from autopar.planner.costs.schedules.pipeline import (
    on_demand_seconds,
    uneven_gpipe_step_seconds,
    uneven_one_f_one_b_least_seconds,
)
from autopar.planner.costs.schedules.simulation import StageSeconds, Transfer
from tests.cells import examples
from tests.planner.costs.schedules.equal_stages import (
    even_stages,
    gpipe_step_seconds,
    interleaved_step_seconds,
    interleaved_zero_bubble_step_seconds,
    simulate,
)
from tests.planner.costs.schedules.orders_read import peak_in_flight, shape_of

SECONDS = st.floats(0.01, 10.0)


def simulated(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    transfers: Sequence[float],
    transfer: Transfer = Transfer.OVERLAPPED,
) -> float:
    stages = [
        StageSeconds(
            forward_seconds=f,
            backward_seconds=b,
            input_gradient_seconds=b / 2,
            weight_gradient_seconds=b / 2,
        )
        for f, b in zip(forward, backward, strict=True)
    ]
    return simulate(schedule, stages, transfer_seconds=transfers, transfer=transfer).step_seconds


def random_pipeline(rng: random.Random, spread: float) -> tuple[int, list[float], list[float]]:
    """Return microbatches, forwards and backwards (twice the forward) of 2 to 16 uneven stages."""
    stages = rng.randint(2, 16)
    forward = [1 + rng.uniform(-spread, spread) for _ in range(stages)]
    return rng.randint(stages, 8 * stages), forward, [2 * seconds for seconds in forward]


def test_the_bound_of_uneven_1f1b_by_hand() -> None:
    # stages of 3 and 5 s. Stage 1: before it 3, its work 2 · 5: 13
    least = uneven_one_f_one_b_least_seconds((1, 2), (2, 3), in_flight=(2, 1), microbatches=2)
    assert least == 13


@settings(max_examples=examples(100))
@given(st.integers(1, 6), st.integers(1, 16), SECONDS, SECONDS)
def test_gpipe_and_1f1b_on_equal_stages_are_as_simulated(
    stages: int, microbatches: int, forward: float, backward: float
) -> None:
    for order in (gpipe, one_f_one_b):  # which differ in memory alone
        assert gpipe_step_seconds(
            forward, backward, stages=stages, microbatches=microbatches
        ) == pytest.approx(
            simulated(
                order(shape_of(stages, microbatches)),
                [forward] * stages,
                [backward] * stages,
                transfers=[0.0] * (stages - 1),
            )
        )


@settings(max_examples=examples(100))
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), SECONDS, SECONDS, SECONDS)
def test_interleaved_schedules_on_equal_stages_are_as_simulated(
    ranks: int, local: int, rounds: int, forward: float, gradient: float, weight: float
) -> None:
    microbatches, stages = ranks * rounds, ranks * local
    even = even_stages(
        stages,
        forward_seconds=forward,
        input_gradient_seconds=gradient,
        weight_gradient_seconds=weight,
    )
    one_by_one, zero_bubble = (
        simulate(
            order(shape_of(ranks, microbatches, local)),
            even,
            transfer_seconds=[0.0] * (stages - 1),
            transfer=Transfer.OVERLAPPED,
        ).step_seconds
        for order in (interleaved_1f1b, interleaved_zero_bubble)
    )
    assert one_by_one == pytest.approx(
        interleaved_step_seconds(
            forward,
            gradient + weight,
            ranks=ranks,
            stages_per_rank=local,
            microbatches=microbatches,
        )
    )
    assert zero_bubble == pytest.approx(
        interleaved_zero_bubble_step_seconds(
            forward,
            gradient,
            weight,
            ranks=ranks,
            stages_per_rank=local,
            microbatches=microbatches,
        )
    )


UNEVEN = st.lists(st.tuples(SECONDS, SECONDS, st.floats(0.0, 5.0)), min_size=1, max_size=7)


@settings(max_examples=examples(150))
@given(UNEVEN, st.integers(1, 20))
def test_uneven_gpipe_is_as_simulated(
    stages: list[tuple[float, float, float]], microbatches: int
) -> None:
    forward, backward, transfers = ([stage[at] for stage in stages] for at in range(3))
    longer = on_demand_seconds(forward, backward, transfers[1:])
    order = gpipe(shape_of(len(stages), microbatches))
    assert uneven_gpipe_step_seconds(*longer, microbatches=microbatches) == pytest.approx(
        simulated(order, forward, backward, transfers=transfers[1:], transfer=Transfer.ON_DEMAND)
    )


@settings(max_examples=examples(300))
@given(UNEVEN, st.integers(1, 20))
def test_1f1b_never_beats_its_lower_bound(
    stages: list[tuple[float, float, float]], microbatches: int
) -> None:
    forward, backward, transfers = ([stage[at] for stage in stages] for at in range(3))
    order = one_f_one_b(shape_of(len(stages), microbatches))
    least = uneven_one_f_one_b_least_seconds(
        *on_demand_seconds(forward, backward, transfers[1:]),
        in_flight=peak_in_flight(order),
        microbatches=microbatches,
    )
    step = simulated(order, forward, backward, transfers=transfers[1:], transfer=Transfer.ON_DEMAND)
    assert least <= step + 1e-9


@pytest.mark.parametrize("spread", [0.2, 0.5])
def test_the_bound_of_uneven_1f1b_is_as_close_as_it_says(spread: float) -> None:
    rng = random.Random(7)
    below: list[float] = []
    for _ in range(150):
        microbatches, forward, backward = random_pipeline(rng, spread)
        none = [0.0] * (len(forward) - 1)
        order = one_f_one_b(shape_of(len(forward), microbatches))
        step = simulated(order, forward, backward, transfers=none)
        least = uneven_one_f_one_b_least_seconds(
            forward, backward, in_flight=peak_in_flight(order), microbatches=microbatches
        )
        below.append(1 - least / step)
    assert median(below) < 1e-9
    assert quantiles(below, n=10)[-1] < 0.01
