"""Tests of the seconds of single ops: which shapes reach the formulas, and what is left out."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Collective
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.kernels.kernels import (
    AttentionShape,
    causal_visible,
    fused_attention_backward_seconds,
    fused_attention_forward_seconds,
    gemm_seconds,
    memory_seconds,
)
from autopar.planner.costs.ops.case import OpSplit, split_of
from autopar.planner.costs.ops.measurements import HostTimes, OpKey, Timing
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.graph.layouts import WHOLE
from autopar.planner.graph.ops import Op
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.programs.layouts.strategies import strategies
from autopar.planner.trace import trace
from tests.planner.costs.ops.op_factories import (
    GPT2,
    device,
    layer_of,
    letter_along,
    op_of,
    pricer,
    shape,
)
from tests.planner.subjects import zoo_graph
from tests.planner.trace.model_source import linear_model, ops_of, traced

ROWS = 4 * 1024


def block_op(prices: OpPricer, kind: str, number: int = 0) -> Op:
    return op_of(prices, layer_of(prices, "Block"), kind, number)


def linear_seconds(prices: OpPricer, inputs: int, outputs: int) -> tuple[float, float, float]:
    """Forward, input gradient and weight gradient, all in bf16."""
    rates, both = prices.rates.own, inputs | outputs
    return (
        gemm_seconds(ROWS, outputs, inputs, rates=rates),
        gemm_seconds(ROWS, inputs, outputs, rates=rates),
        gemm_seconds(inputs, outputs, ROWS, rates=rates, contiguous=both),
    )


def test_products_that_fuse_gradients_read_and_write_an_fp32_sum() -> None:
    prices = pricer()
    prices.fuses_gradients = True
    rates = prices.rates.own
    bias = memory_seconds((ROWS + 1) * 3072 * 2, rates=rates, access=rates.access.row_sum)
    sums = gemm_seconds(768, 3072, ROWS, rates=rates, stored_bytes=8, contiguous=768 | 3072)
    up = block_op(prices, "linear", 2)  # 768 → 3072
    assert prices.cost(up).weight_gradient_seconds == pytest.approx(sums + bias)


def test_each_factor_of_an_elementwise_product_has_a_kernel_for_its_gradient() -> None:
    # x · sin of a rotary embedding: x alone learns. silu(gate) · up: both factors learn.
    prices = pricer("llama.py", "size=1b", "seq_len=4096")
    layer = layer_of(prices, "Block")
    turned, gated = (op_of(prices, layer, "mul", number) for number in (1, 4))
    strided = prices.rates.own.access.strided  # sin is broadcast over rows and heads
    for op, learned, access in ((turned, 1, strided), (gated, 2, 1.0)):
        x, other = (prices.tensor_bytes(name, WHOLE, 1) for name in op.inputs)
        each = memory_seconds(2 * x + other, rates=prices.rates.own, access=access)
        assert prices.cost(op).backward_seconds == pytest.approx(learned * each)


def test_the_gradients_of_joined_tensors_are_views_of_the_gradient_of_the_whole() -> None:
    prices = pricer("llama.py", "size=1b", "seq_len=4096")
    joined = op_of(prices, layer_of(prices, "Block"), "cat")
    assert prices.cost(joined).backward_seconds == 0
    assert prices.cost(joined).forward_seconds > 0


def test_a_linear_is_three_products_and_the_sum_of_its_bias() -> None:
    prices = pricer()
    up = block_op(prices, "linear", 2)  # 768 → 3072
    forward, own, weight = linear_seconds(prices, 768, 3072)
    rates = prices.rates.own
    bias = memory_seconds((ROWS + 1) * 3072 * 2, rates=rates, access=rates.access.row_sum)
    cost = prices.cost(up)
    assert cost.forward_seconds == pytest.approx(forward)
    assert cost.weight_gradient_seconds == pytest.approx(weight + bias)
    assert cost.backward_seconds == pytest.approx(own + weight + bias)


def test_a_column_split_makes_fewer_outputs_and_a_row_split_contracts_less() -> None:
    prices = pricer()
    up, down = block_op(prices, "linear", 2), block_op(prices, "linear", 3)
    columns = letter_along(prices, up, "ffn", degree=8)  # 3072 ÷ 8 = 384
    rows = letter_along(prices, down, "ffn", degree=8)
    forward_up, *_ = linear_seconds(prices, 768, 384)
    forward_down, *_ = linear_seconds(prices, 384, 768)
    assert prices.cost(up, columns).forward_seconds == pytest.approx(forward_up)
    assert prices.cost(down, rows).forward_seconds == pytest.approx(forward_down)


def test_a_split_log_of_a_sum_of_exponentials_gathers_a_number_per_row(tmp_path: Path) -> None:
    graph = traced(tmp_path, linear_model("return self.linear(x).logsumexp(1)"))
    axes = infer_axes(graph)
    prices = OpPricer(graph, axes, batch=4, precision=Precision.BF16, device=device())
    (op,) = ops_of(graph, "logsumexp")
    whole, *_, split = strategies(op, graph, axes, degree=2, batch=4)
    group = shape(2)
    # 4 rows, of which each of 2 ranks sends an fp32 number
    expected = collective_seconds(Collective.ALL_GATHER, 2 * 4 * 4, group)
    assert prices.inside_seconds(op, split_of(split, 2), group) == expected > 0
    assert prices.inside_seconds(op, split_of(whole, 2), group) == 0


def test_a_fused_matrix_is_split_in_all_its_parts() -> None:
    prices = pricer()
    qkv = block_op(prices, "linear")
    heads = letter_along(prices, qkv, "heads", degree=4)
    assert prices.shapes(qkv, heads).shape(qkv.outputs[0]) == (4, 1024, 3 * 3 * 64)
    cut = block_op(prices, "split_with_sizes")
    part = letter_along(prices, cut, "heads", degree=4)
    assert [prices.shapes(cut, part).shape(out) for out in cut.outputs] == [(4, 1024, 192)] * 3
    assert prices.shapes(cut, part).shape(cut.inputs[0]) == (4, 1024, 576)


def test_what_does_not_divide_leaves_the_fullest_rank() -> None:
    prices = pricer()
    attention = block_op(prices, "scaled_dot_product_attention")
    heads = letter_along(prices, attention, "heads", degree=8)  # 12 heads on 8 ranks: 2
    assert prices.shapes(attention, heads).shape(attention.outputs[0]) == (4, 2, 1024, 64)


def test_attention_is_one_fused_causal_kernel() -> None:
    prices = pricer()
    op = block_op(prices, "scaled_dot_product_attention")
    cost = prices.cost(op, letter_along(prices, op, "heads", degree=4))
    shape = AttentionShape(
        batch=4, heads=3, kv_heads=3, query_length=1024, key_length=1024, head_dim=64,
        value_dim=64, visible=causal_visible(1024, 128),
    )  # fmt: skip
    rates = prices.rates.own
    assert cost.forward_seconds == pytest.approx(
        fused_attention_forward_seconds(shape, rates=rates)
    )
    assert cost.backward_seconds == pytest.approx(
        fused_attention_backward_seconds(shape, rates=rates)
    )
    assert cost.weight_gradient_seconds == 0


@pytest.mark.parametrize(("device_name", "length"), [("a100", 256), ("cpu", 197)])
def test_attention_over_197_patches_takes_two_blocks_on_a_gpu(
    device_name: str, length: int
) -> None:
    prices = pricer("vit.py", "size=b16", batch=64, device_name=device_name)
    op = op_of(prices, layer_of(prices, "Block"), "scaled_dot_product_attention")
    shape = AttentionShape(
        batch=64, heads=12, kv_heads=12, query_length=length, key_length=length,
        head_dim=64, value_dim=64, element_bytes=2,
    )  # fmt: skip
    seconds = fused_attention_forward_seconds(shape, rates=prices.rates.of(2))
    assert prices.cost(op).forward_seconds == pytest.approx(seconds)


def test_grouped_queries_read_fewer_keys() -> None:
    prices = pricer("llama.py")
    op = op_of(prices, layer_of(prices, "Block"), "scaled_dot_product_attention")
    shapes = prices.shapes(op, letter_along(prices, op, "kv_heads", degree=2))
    heads, kv_heads = (shapes.letters(name) for name in ("h", "k"))
    whole = prices.shapes(op)
    assert (2 * heads, 2 * kv_heads) == (whole.letters("h"), whole.letters("k"))
    assert whole.letters("h") > whole.letters("k")


def test_a_norm_has_a_kernel_forward_and_two_backward() -> None:
    # 32 · 1024 rows of 768 · 2 bytes: 50.3 MB, at 0.75 · 2.039 TB/s. Forward: 100.7 MB at 0.57 of
    # it, 115.5 us; 32,768 · 0.12 us ÷ 108 = 36.4 us; launch 4. Backward: 151 MB at 0.68, 145.2 us;
    # weight and bias: 32,768 rows of 4.3 ns, 140.9 us; two launches.
    prices = pricer(batch=32)
    norm = block_op(prices, "layer_norm")
    cost = prices.cost(norm)
    assert cost.forward_seconds == pytest.approx(155.9e-6, rel=2e-3)
    assert cost.backward_seconds == pytest.approx(294.1e-6, rel=2e-3)
    prices = pricer(batch=32)
    prices.fuses_gradients = True  # frameworks with kernels of their own: 2 and 3 + 2 passes
    cost = prices.cost(norm)
    assert cost.forward_seconds == pytest.approx(65.8e-6 + 4e-6, rel=2e-3)
    assert cost.backward_seconds == pytest.approx(2.5 * 65.8e-6 + 8e-6, rel=2e-3)


def access_of(prices: OpPricer, op: Op, moved: int) -> float:
    """Return the share of the bandwidth at which an op's forward moves so many bytes."""
    rates = prices.rates.own
    return memory_seconds(moved, rates=rates) / prices.cost(op).forward_seconds


def test_parts_of_tensors_are_read_element_by_element() -> None:
    # rotate_half: the second half is negated, and joined with the first.
    prices = pricer("llama.py", "size=1b", "seq_len=4096", batch=16)
    layer = layer_of(prices, "Block")
    negated, joined = op_of(prices, layer, "neg"), op_of(prices, layer, "cat")
    access = prices.rates.own.access
    half = prices.tensor_bytes(negated.outputs[0], WHOLE, 1)
    assert access_of(prices, negated, 2 * half) == pytest.approx(access.strided, rel=0.02)
    assert access_of(prices, joined, 4 * half) == pytest.approx(access.strided_join, rel=0.02)


def test_a_cast_to_a_wider_type_is_slow_and_its_gradient_is_not() -> None:
    graph = zoo_graph(*GPT2, precision=Precision.BF16)
    prices = OpPricer(
        graph, infer_axes(graph), batch=4, precision=Precision.BF16, device=device("a100")
    )
    cast = next(op for op in graph.ops if op.target == "aten.to.dtype")  # logits to fp32: 2 + 4
    moved = 6 * ROWS * 50257
    cost, rates = prices.cost(cast), prices.rates.own
    assert cost.forward_seconds == pytest.approx(
        memory_seconds(moved, rates=rates, access=rates.access.casting)
    )
    assert cost.backward_seconds == pytest.approx(memory_seconds(moved, rates=rates))


NORM_IN_FP32 = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1024, 1024)
    def forward(self, x):
        h = self.head(x)
        return (torch.tanh(h.float()).to(h.dtype) ** 2).mean()

def build_model():
    return Model()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 1024)}
"""


def test_the_gradient_of_a_cast_to_16_bits_is_slow(tmp_path: Path) -> None:
    (path := tmp_path / "model.py").write_text(NORM_IN_FP32)
    graph = trace(load_model_file(str(path)), precision=Precision.BF16)
    prices = OpPricer(
        graph, infer_axes(graph), batch=4096, precision=Precision.BF16, device=device("a100")
    )
    widens, narrows = (op for op in graph.ops if op.target == "aten.to.dtype")
    streamed, cast = (
        memory_seconds(6 * 4096 * 1024, rates=prices.rates.own, access=access)
        for access in (1.0, prices.rates.own.access.casting)
    )
    for op, forward, backward in ((widens, cast, streamed), (narrows, streamed, cast)):
        cost = prices.cost(op)
        assert cost.forward_seconds == pytest.approx(forward)
        assert cost.backward_seconds == pytest.approx(backward)


def test_gradients_of_unbind_are_stacked_and_copied_back_into_the_order_of_the_tensor() -> None:
    prices = pricer("vit.py", "size=b16", batch=64)
    unbound = op_of(prices, layer_of(prices, "Block"), "unbind")
    rates = prices.rates.own
    moved = 2 * 64 * 197 * 3 * 768 * 2
    stacked, copied = (
        memory_seconds(moved, rates=rates, access=access)
        for access in (rates.access.strided_join, rates.access.strided)
    )
    cost = prices.cost(unbound)
    assert cost.forward_seconds == 0
    assert cost.backward_seconds == pytest.approx(stacked + copied)


def test_views_and_sums_of_equal_shapes_move_nothing_but_the_gradients_that_meet() -> None:
    prices = pricer()
    assert prices.cost(block_op(prices, "view")).forward_seconds == 0
    assert prices.cost(block_op(prices, "view")).backward_seconds == 0
    # add_1 = residual + dropout: the residual's gradient meets that of the norm
    met = memory_seconds(3 * ROWS * 768 * 2, rates=prices.rates.own)
    assert prices.cost(block_op(prices, "add")).backward_seconds == pytest.approx(met)


def test_what_needs_no_gradient_has_no_backward() -> None:
    prices = pricer("llama.py")
    free = [op for op in prices.graph.ops if not prices.graph.tensors[op.outputs[0]].requires_grad]
    assert free
    assert all(prices.cost(op).backward_seconds == 0 for op in free)


def test_fp32_products_run_on_plain_units_and_convolutions_on_tf32() -> None:
    prices = pricer("resnet.py", precision=Precision.FP32)
    assert prices.rates.of(4).peak_flops_per_second == 19.5e12
    assert prices.rates.of_convolution(4).peak_flops_per_second == 156e12


def test_every_op_of_the_zoo_has_a_price() -> None:
    for name in ("bert.py", "t5.py", "resnet.py", "vit.py", "intent.py", "mnist.py"):
        for precision in Precision:
            prices = pricer(name, precision=precision)
            for op in prices.graph.ops:
                cost = prices.cost(op)
                assert 0 <= cost.weight_gradient_seconds <= cost.backward_seconds
                assert cost.forward_seconds >= 0


class Table:
    """What a profile measured, by the ops' keys."""

    def __init__(self, timings: dict[OpKey, Timing]) -> None:
        self.timings = timings

    def seconds(self, key: OpKey) -> Timing | None:
        return self.timings.get(key)

    def host(self, device: str) -> HostTimes | None:
        del device
        return None


def test_a_measured_op_overrides_the_formula_for_its_local_shape_alone() -> None:
    plain = pricer()
    up = block_op(plain, "linear", 2)
    split = letter_along(plain, up, "ffn", degree=2)
    timing = Timing(forward_seconds=1.0, backward_seconds=3.0)
    prices = pricer(measured=Table({plain.key(up, split): timing}))
    cost, formula = prices.cost(up, split), plain.cost(up, split)
    assert (cost.forward_seconds, cost.backward_seconds, cost.measured) == (1.0, 3.0, True)
    share = formula.weight_gradient_seconds / formula.backward_seconds
    assert cost.weight_gradient_seconds == pytest.approx(3.0 * share)
    assert prices.cost(up) == plain.cost(up)


def test_on_a_cpu_dispatch_and_work_take_turns() -> None:
    host = pricer(device_name="cpu", precision=Precision.FP32).host
    assert host.forward_region_seconds(1.0, 10) == pytest.approx(1.0 + 10 * host.forward_seconds)
    ahead = pricer().host
    assert ahead.forward_region_seconds(1.0, 10) == 1.0
    assert ahead.forward_region_seconds(0.0, 10) == pytest.approx(10 * ahead.forward_seconds)


degrees = st.sampled_from([2, 3, 4, 6])  # 12 heads and 3072 of ffn stay whole multiples of 16 bytes


@given(number=st.integers(0, 20), degree=degrees, batch=st.sampled_from([1, 2, 8]))
def test_a_split_never_takes_longer_than_the_whole(number: int, degree: int, batch: int) -> None:
    prices = pricer(*GPT2, batch=batch)
    op = layer_of(prices, "Block").ops[number]
    for letter, axis in splits(prices, op):
        part = prices.cost(op, OpSplit(letter=letter, axis=axis, degree=degree))
        assert part.forward_seconds <= prices.cost(op).forward_seconds * (1 + 1e-9)
        assert part.backward_seconds <= prices.cost(op).backward_seconds * (1 + 1e-9)
        alone = prices.cost(op, OpSplit(letter=letter, axis=axis, degree=1))
        assert alone == prices.cost(op)


def splits(prices: OpPricer, op: Op) -> list[tuple[str, str]]:
    found = []
    for axis in ("heads", "ffn", "embed"):
        try:
            split = letter_along(prices, op, axis, degree=2)
        except LookupError:
            continue
        found.append((split.letter, split.axis))
    return found
