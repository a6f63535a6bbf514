"""Tests of the formulas of collectives: a number by hand for each, and their limits."""

import pytest
from hypothesis import strategies as st

from autopar.planner.costs.collectives import algorithms as collectives

MEGABYTE = 1e6
GIGABYTE = 1e9


def test_a_ring_all_reduce_by_hand() -> None:
    # 2·3/4 · 100 MB ÷ 100 GB/s
    seconds = collectives.ring_all_reduce_seconds(100 * MEGABYTE, 4, rate=100e9)
    assert seconds == pytest.approx(1500e-6)


def test_a_ring_all_gather_by_hand() -> None:
    # 3/4 · 100 MB ÷ 100 GB/s
    seconds = collectives.ring_all_gather_seconds(100 * MEGABYTE, 4, rate=100e9)
    assert seconds == pytest.approx(750e-6)


def test_a_tree_all_reduce_by_hand() -> None:
    # 8 units: 2 · 100 MB ÷ 100 GB/s; 2 units swap halves
    eight = collectives.tree_all_reduce_seconds(100 * MEGABYTE, rate=100e9, units=8)
    two = collectives.tree_all_reduce_seconds(100 * MEGABYTE, rate=100e9, units=2)
    assert eight == pytest.approx(2000e-6)
    assert two == pytest.approx(1000e-6)


@pytest.mark.parametrize(("units", "depth"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6)])
def test_a_tree_is_as_deep_as_the_logarithm(units: int, depth: int) -> None:
    assert collectives.tree_depth(units) == depth


def test_an_in_switch_all_reduce_by_hand() -> None:
    # (1 + 1/4) · 100 MB ÷ 100 GB/s
    seconds = collectives.in_switch_all_reduce_seconds(100 * MEGABYTE, 4, rate=100e9)
    assert seconds == pytest.approx(1250e-6)


def test_an_all_to_all_by_hand() -> None:
    # 4/8 · 80 MB ÷ 10 GB/s
    seconds = collectives.all_to_all_seconds(80 * MEGABYTE, 8, peers_outside=4, rate=10e9)
    assert seconds == pytest.approx(4000e-6)


def test_all_to_alls_on_rings_by_hand() -> None:
    # one way: 3/2 · 8 MB ÷ 10 GB/s
    # both ways: distances 1, 2, 1 = 4 pieces of 2 MB over 20 GB/s
    one = collectives.ring_all_to_all_seconds(8 * MEGABYTE, 4, rate=10e9)
    both = collectives.double_ring_all_to_all_seconds(8 * MEGABYTE, 4, rate=10e9)
    assert one == pytest.approx(1200e-6)
    assert both == pytest.approx(400e-6)


payloads = st.floats(1.0, 1e12)
rates = st.floats(1e6, 1e13)
