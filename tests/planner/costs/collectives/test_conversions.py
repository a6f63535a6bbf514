"""Tests of the seconds of conversions between layouts."""

from functools import cache

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.graph.layouts import PARTIAL, REPLICATED, WHOLE, Layout, split
from tests.planner.costs.ops.op_factories import layer_of, pricer, shape

WHOLE_BYTES = 4 * 1024 * 768 * 2
prices = cache(pricer)


def added() -> str:
    """Return the last tensor of a block: [batch 4, seq 1024, embed 768]."""
    return layer_of(prices(), "Block").ops[-1].outputs[0]


def axis(dim: int) -> Layout:
    leaf = prices().axes.dims[added()][dim]
    return split(getattr(leaf, "name", ""), dim)


def collective(kind: Collective) -> float:
    return collective_seconds(kind, WHOLE_BYTES, shape(4))


def both(produced: Layout, needed: Layout) -> tuple[float, float]:
    return prices().conversion_seconds(added(), produced, needed, 4, shape(4))


def test_megatrons_two_functions_reduce_in_one_direction() -> None:
    assert both(WHOLE, REPLICATED) == (0.0, collective(Collective.ALL_REDUCE))
    assert both(PARTIAL, WHOLE) == (collective(Collective.ALL_REDUCE), 0.0)


def test_sequence_parallelism_gathers_and_scatters_the_whole_tensor() -> None:
    moved = memory_seconds(2 * WHOLE_BYTES, rates=prices().rates.own)  # rows are not in one piece
    gather = collective(Collective.ALL_GATHER) + moved
    scatter = collective(Collective.REDUCE_SCATTER) + moved
    assert both(axis(1), REPLICATED) == pytest.approx((gather, scatter))
    assert both(PARTIAL, axis(1)) == pytest.approx((scatter, gather))


def test_the_outermost_dim_is_gathered_without_a_copy() -> None:
    forward, _ = both(axis(0), WHOLE)
    assert forward == pytest.approx(collective(Collective.ALL_GATHER))


def test_a_slice_copies_one_part_and_padding_writes_the_whole() -> None:
    part = WHOLE_BYTES // 4
    forward, backward = both(REPLICATED, axis(1))
    assert forward == pytest.approx(memory_seconds(2 * part, rates=prices().rates.own))
    assert backward == pytest.approx(memory_seconds(part + WHOLE_BYTES, rates=prices().rates.own))


def test_an_exchange_sends_one_ranks_part() -> None:
    forward, backward = both(axis(1), axis(2))
    part = WHOLE_BYTES // 4
    wire = collective_seconds(Collective.ALL_TO_ALL, part, shape(4))
    assert forward == backward
    assert forward == pytest.approx(wire + memory_seconds(2 * part, rates=prices().rates.own))


def test_one_rank_or_equal_layouts_convert_nothing() -> None:
    assert prices().conversion_seconds(added(), PARTIAL, WHOLE, 1, shape(1)) == (0.0, 0.0)
    assert both(WHOLE, WHOLE) == (0.0, 0.0)


def test_no_gradient_flows_back_to_where_none_is_needed() -> None:
    labels = next(name for name in prices().graph.inputs)
    leaf = prices().axes.dims[labels][1]
    gathered = prices().conversion_seconds(
        labels, WHOLE, split(getattr(leaf, "name", ""), 1), 4, shape(4)
    )
    assert gathered[0] > 0
    assert gathered[1] == 0
