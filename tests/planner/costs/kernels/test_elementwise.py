"""Tests of the seconds of memory-bound ops."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.kernels.kernels import (
    cross_entropy_seconds,
    dropout_seconds,
    elementwise_seconds,
    embedding_backward_seconds,
    embedding_forward_seconds,
    memory_seconds,
)
from tests.planner.costs.kernels.compute_factories import real_rates, round_rates

# Of the round device: stream 0.5 TB/s, cache of 1 MB at 3 TB/s, launch 1 us. 10 M elements leave
# the cache.
TEN_MILLION = 10_000_000


@pytest.mark.parametrize(
    ("moved_bytes", "microseconds"),
    [
        (50_000_000, 101.0),  # 50 MB ÷ 0.5 TB/s = 100
        (900_000, 1.3),  # in the cache: 0.9 MB ÷ 3 TB/s = 0.3
        (1_500_000, 1 + 0.25 + 1.5),  # half of it: 0.5 · (1.5 ÷ 3) + 0.5 · (1.5 ÷ 0.5)
        (0, 1.0),
    ],
)
def test_bytes_run_at_the_speed_of_where_they_lie(moved_bytes: float, microseconds: float) -> None:
    assert memory_seconds(moved_bytes, rates=round_rates()) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(
    ("formula", "microseconds"),
    [
        (partial(elementwise_seconds, passes=2), 81.0),  # 2 · 20 MB = 40 MB
        (partial(elementwise_seconds, passes=3), 121.0),  # 60 MB
        (dropout_seconds, 101.0),  # 2 + 2 + 1 bytes = 50 MB
    ],
)
def test_an_op_costs_the_tensors_it_reads_and_writes(
    formula: Callable[..., float], microseconds: float
) -> None:
    seconds = formula(TEN_MILLION, element_bytes=2, rates=round_rates())
    assert seconds == pytest.approx(microseconds * 1e-6)


def test_exponentials_bind_where_they_are_slow() -> None:
    # 10 M exp at 10 G/s = 1 ms, against 80 us of bytes.
    rates = round_rates(exponentials_per_second=1e10)
    seconds = elementwise_seconds(
        TEN_MILLION, element_bytes=2, passes=2, rates=rates, exponentials=1
    )
    assert seconds == pytest.approx(1.001e-3)


def test_a_table_is_gathered_and_its_gradient_filled_and_scattered() -> None:
    # Gather at 0.4 of the stream: 2 · 10,000 · 1000 · 2 bytes = 40 MB ÷ 200 GB/s = 200 us.
    rates = round_rates()
    forward = embedding_forward_seconds(10_000, 1000, written=10_000, element_bytes=2, rates=rates)
    assert forward == pytest.approx(201e-6, rel=1e-4)
    # Of bags of ten: (10,000 + 1000) · 1000 · 2 bytes = 22 MB ÷ 200 GB/s = 110 us.
    bags = embedding_forward_seconds(10_000, 1000, written=1000, element_bytes=2, rates=rates)
    assert bags == pytest.approx(111e-6, rel=1e-4)
    # Fill 50,000 · 1000 · 2 = 100 MB: 200 us; scatter 60 MB ÷ 200 GB/s = 300 us; two launches.
    backward = embedding_backward_seconds(
        10_000, 1000, vocabulary=50_000, element_bytes=2, rates=rates
    )
    assert backward == pytest.approx(502e-6, rel=1e-4)


def test_a_loss_reads_its_logits() -> None:
    # 1000 · 50,000 · 2 bytes = 100 MB ÷ (0.66 · 0.5 TB/s) = 303.03 us a pass.
    rates = round_rates()
    forward = cross_entropy_seconds(1000, 50_000, element_bytes=2, passes=1, rates=rates)
    backward = cross_entropy_seconds(1000, 50_000, element_bytes=2, passes=2, rates=rates)
    assert forward == pytest.approx(304.03e-6, rel=1e-4)
    assert backward == pytest.approx(607.06e-6, rel=1e-4)


@given(st.floats(1e9, 1e12))
def test_what_leaves_the_cache_never_beats_the_data_sheet(moved_bytes: float) -> None:
    assert memory_seconds(moved_bytes, rates=real_rates()) >= moved_bytes / 1.935e12
