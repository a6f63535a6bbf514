"""Tests of the seconds of conversions between layouts."""

from functools import cache

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.collectives.conversions import fused_seconds
from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.layouts import PARTIAL, REPLICATED, WHOLE, Layout, split
from autopar.planner.layers import Compile
from autopar.planner.precision import Precision
from tests.planner.costs.ops.op_factories import device, known, layer_of, op_of, pricer, shape

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


def test_a_fused_message_and_its_product_take_the_longer_time_and_a_piece_of_the_other() -> None:
    # 8 pieces: 10 ms of products hide a message of 4 ms but for its first piece, 0.5 ms
    assert fused_seconds(10e-3, 4e-3, pieces=8) == pytest.approx(10.5e-3)
    assert fused_seconds(4e-3, 10e-3, pieces=8) == pytest.approx(10.5e-3)
    assert fused_seconds(10e-3, 4e-3, pieces=1) == pytest.approx(14e-3)  # one after another


def waited_for(dim: int, *, of_result: bool) -> tuple[float, float]:
    """Return the share of each message of a Llama's MLP that fused products do not hide."""
    messages = []
    graph, axes, layers = known("llama.py", "size=1b", "layers=1")
    for compile_ in (Compile.LAYERS, Compile.FUSED):
        own = OpPricer(
            graph, axes, batch=4, precision=Precision.BF16, device=device("h100"), layers=layers,
            compile_=compile_,
        )  # fmt: skip
        gate, up, down = (op_of(own, layer_of(own, "Block"), "linear", at) for at in (4, 5, 6))
        assert gate.inputs[0] == up.inputs[0]
        tensor = down.outputs[0] if of_result else gate.inputs[0]
        part = split(getattr(axes.dims[tensor][dim], "name", ""), dim)
        ends = (PARTIAL, part) if of_result else (part, REPLICATED)
        cost = own.conversion(tensor, *ends, degree=4, shape=shape(4))
        messages.append((cost.forward_communication_seconds, cost.backward_communication_seconds))
    (forward, backward), (less_forward, less_backward) = messages
    return less_forward / forward, less_backward / backward


def test_gathers_and_sums_are_fused_and_the_sum_of_several_products_gradients_is_not() -> None:
    # two products take longer than the message that they read: one of its four pieces is left
    assert waited_for(1, of_result=False) == pytest.approx((0.25, 1.0))
    # one product takes less time than the message of its result
    assert all(0.25 < share < 0.5 for share in waited_for(1, of_result=True))


def test_messages_of_the_last_dim_are_not_fused() -> None:
    assert waited_for(2, of_result=False) == (1.0, 1.0)


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
