"""Tests of the formulas of collectives: a number by hand for each, and their limits."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.collectives import algorithms as collectives

MEGABYTE = 1e6
GIGABYTE = 1e9


def test_a_ring_all_reduce_by_hand() -> None:
    # 2·3 µs + 2·3/4 · 100 MB ÷ 100 GB/s = 6 µs + 1500 µs
    seconds = collectives.ring_all_reduce_seconds(100 * MEGABYTE, 4, rate=100e9, hops_seconds=3e-6)
    assert seconds == pytest.approx(1506e-6)


def test_a_double_ring_all_reduce_by_hand() -> None:
    # half of the payload each way: 6 µs + 750 µs
    seconds = collectives.double_ring_all_reduce_seconds(
        100 * MEGABYTE, 4, rate=100e9, hops_seconds=3e-6
    )
    assert seconds == pytest.approx(756e-6)


def test_a_ring_all_gather_by_hand() -> None:
    # 3 µs + 3/4 · 100 MB ÷ 100 GB/s = 3 µs + 750 µs
    seconds = collectives.ring_all_gather_seconds(100 * MEGABYTE, 4, rate=100e9, hops_seconds=3e-6)
    assert seconds == pytest.approx(753e-6)


def test_a_double_ring_all_gather_by_hand() -> None:
    # 3 µs + 375 µs
    seconds = collectives.double_ring_all_gather_seconds(
        100 * MEGABYTE, 4, rate=100e9, hops_seconds=3e-6
    )
    assert seconds == pytest.approx(378e-6)


def test_a_tree_all_reduce_by_hand() -> None:
    # 8 units: 2·15 µs + 2 · 100 MB ÷ 100 GB/s = 2030 µs; 2 units swap halves: 30 µs + 1000 µs
    eight = collectives.tree_all_reduce_seconds(
        100 * MEGABYTE, 8, rate=100e9, units=8, depth_seconds=15e-6
    )
    two = collectives.tree_all_reduce_seconds(
        100 * MEGABYTE, 2, rate=100e9, units=2, depth_seconds=15e-6
    )
    assert eight == pytest.approx(2030e-6)
    assert two == pytest.approx(1030e-6)


@pytest.mark.parametrize(("units", "depth"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6)])
def test_a_tree_is_as_deep_as_the_logarithm(units: int, depth: int) -> None:
    assert collectives.tree_depth(units) == depth


def test_an_in_switch_all_reduce_by_hand() -> None:
    # 20 µs + (1 + 1/4) · 100 MB ÷ 100 GB/s = 20 µs + 1250 µs
    seconds = collectives.in_switch_all_reduce_seconds(
        100 * MEGABYTE, 4, rate=100e9, setup_seconds=20e-6
    )
    assert seconds == pytest.approx(1270e-6)


def test_a_pipelined_hierarchy_takes_its_slower_half() -> None:
    seconds = collectives.pipelined_hierarchical_all_reduce_seconds(
        3e-3, 2e-3, latency_seconds=1e-4
    )
    assert seconds == pytest.approx(3.1e-3)


def test_broadcasts_by_hand() -> None:
    # 7 µs + 100 MB ÷ 100 GB/s; the tree is 3 µs deep
    chain = collectives.chain_broadcast_seconds(100 * MEGABYTE, 8, rate=100e9, hops_seconds=7e-6)
    tree = collectives.tree_broadcast_seconds(100 * MEGABYTE, 8, rate=100e9, depth_seconds=3e-6)
    assert chain == pytest.approx(1007e-6)
    assert tree == pytest.approx(1003e-6)


def test_a_message_by_hand() -> None:
    # 5 µs + 10 MB ÷ 10 GB/s
    seconds = collectives.point_to_point_seconds(10 * MEGABYTE, rate=10e9, hop_seconds=5e-6)
    assert seconds == pytest.approx(1005e-6)


def test_an_all_to_all_by_hand() -> None:
    # 7 · 1 µs + 4/8 · 80 MB ÷ 10 GB/s = 7 µs + 4000 µs
    seconds = collectives.all_to_all_seconds(
        80 * MEGABYTE, 8, peers_outside=4, rate=10e9, hop_seconds=1e-6
    )
    assert seconds == pytest.approx(4007e-6)


def test_all_to_alls_on_rings_by_hand() -> None:
    # one way: 3 µs + 3/2 · 8 MB ÷ 10 GB/s = 1203 µs
    # both ways: distances 1, 2, 1 = 4 pieces of 2 MB over 20 GB/s = 400 µs, + 3 µs
    one = collectives.ring_all_to_all_seconds(8 * MEGABYTE, 4, rate=10e9, hops_seconds=3e-6)
    both = collectives.double_ring_all_to_all_seconds(8 * MEGABYTE, 4, rate=10e9, hops_seconds=3e-6)
    assert one == pytest.approx(1203e-6)
    assert both == pytest.approx(403e-6)


ROUNDS = [
    collectives.ring_all_reduce_seconds,
    collectives.double_ring_all_reduce_seconds,
    collectives.ring_all_gather_seconds,
    collectives.double_ring_all_gather_seconds,
    collectives.chain_broadcast_seconds,
    collectives.ring_all_to_all_seconds,
    collectives.double_ring_all_to_all_seconds,
]


@pytest.mark.parametrize("formula", ROUNDS)
def test_one_rank_costs_nothing(formula: Callable[..., float]) -> None:
    assert formula(GIGABYTE, 1, rate=1e9, hops_seconds=1e-3) == 0.0


payloads = st.floats(1.0, 1e12)
rates = st.floats(1e6, 1e13)
latencies = st.floats(0.0, 1e-2)


@given(payloads, st.integers(2, 4096), rates, latencies)
def test_a_ring_reduce_scatter_and_all_gather_are_an_all_reduce(
    payload: float, ranks: int, rate: float, hops: float
) -> None:
    half = collectives.ring_all_gather_seconds(payload, ranks, rate=rate, hops_seconds=hops)
    whole = collectives.ring_all_reduce_seconds(payload, ranks, rate=rate, hops_seconds=hops)
    assert 2 * half == pytest.approx(whole)


@given(st.integers(2, 10**6))
def test_a_ring_of_many_ranks_approaches_twice_the_payload(ranks: int) -> None:
    seconds = collectives.ring_all_reduce_seconds(GIGABYTE, ranks, rate=1e9, hops_seconds=0.0)
    assert 2 - 2 / ranks == pytest.approx(seconds)
    assert seconds < 2
