from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.cluster import Collective, MeasuredCollective
from autopar.planner.costs.collectives.choice import least_seconds_per_byte, measured_seconds

KNOWN = MeasuredCollective(
    collective=Collective.ALL_REDUCE,
    ranks=2,
    alpha_seconds=1e-3,
    bytes_per_second=1e9,
    points=((1_000, 2e-3), (100_000, 8e-3)),
)


def test_between_two_payloads_the_line_is_straight_on_logarithmic_scales() -> None:
    # 10 000 is half-way between 1 000 and 100 000, so 4 ms, half-way between 2 and 8.
    assert measured_seconds(KNOWN, 10_000, 2) == pytest.approx(4e-3)


def test_outside_of_what_was_measured_small_takes_as_long_and_large_in_proportion() -> None:
    assert measured_seconds(KNOWN, 10, 2) == 2e-3
    assert measured_seconds(KNOWN, 300_000, 2) == pytest.approx(24e-3)


def test_more_ranks_change_the_figure_as_the_fitted_line_says() -> None:
    # 2 ranks: 2·1·1 ms + 2·1/2·100 kB ÷ 1 GB/s = 2.1 ms; 4 ranks: 2·3·1 ms + 2·3/4·0.1 ms = 6.15.
    assert measured_seconds(KNOWN, 100_000, 4) == pytest.approx((8 + 6.15 - 2.1) * 1e-3)


def test_a_shared_link_slows_the_wire_not_the_latency() -> None:
    # Half of the rate: 2 ms + 0.2 ms against 2.1 ms.
    assert measured_seconds(KNOWN, 100_000, 2, shared=0.5) == pytest.approx((8 + 2.2 - 2.1) * 1e-3)


def test_fewer_ranks_take_the_share_that_the_fitted_line_says() -> None:
    many = replace(KNOWN, ranks=4)  # 6.15 ms by the line, 2.1 ms on two ranks
    assert measured_seconds(many, 100_000, 2) == pytest.approx(8e-3 * 2.1 / 6.15)


@given(st.floats(1, 1e9), st.floats(1, 1e9), st.integers(2, 64), st.integers(2, 64))
def test_a_larger_payload_is_never_quicker(
    one: float, other: float, ranks: int, measured: int
) -> None:
    known = replace(KNOWN, ranks=measured)
    small, large = (measured_seconds(known, size, ranks) for size in sorted((one, other)))
    assert 0 < small <= large * (1 + 1e-9)


@given(st.floats(1, 1e9), st.integers(2, 64), st.integers(2, 64), st.sampled_from((1.0, 0.25)))
def test_no_payload_takes_less_than_the_least_per_byte(
    size: float, ranks: int, measured: int, shared: float
) -> None:
    known = replace(KNOWN, ranks=measured, points=(*KNOWN.points, (10_000_000, 2.0)))
    least = size * least_seconds_per_byte(known, ranks, shared=shared)
    assert 0 < least <= measured_seconds(known, size, ranks, shared=shared) * (1 + 1e-9)
