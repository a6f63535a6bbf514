"""Products in float8: which they are, and that their seconds are those by hand."""

from __future__ import annotations

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.kernels.kernels import gemm_seconds, memory_seconds
from autopar.planner.costs.layers.flow import (
    UNSHARED,
    LayerFlow,
    layer_flow,
    layer_parameters,
    working_bytes,
)
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.errors import InputError
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Compile, float8_linears
from autopar.planner.plan.declared.constraints import Constraints, constraints_of
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.planned import check_float8, check_float8_sizes
from autopar.planner.precision import Float8, Precision
from autopar.runtime.model.parts import SCALINGS
from tests.planner.costs.ops.op_factories import (
    device,
    known,
    layer_of,
    letter_along,
    op_of,
    shape,
    whole,
)

LLAMA = ("llama.py", "size=8b", "layers=2")
ROWS, WIDE, FFN = 8192, 4096, 14336


def prices(float8: Float8, *case: str, compiles: bool = True, name: str = "h100") -> OpPricer:
    graph, axes, layers = known(*(case or LLAMA))
    return OpPricer(
        graph, axes, batch=1, precision=Precision.BF16, device=device(name), layers=layers,
        compile_=Compile.LAYERS if compiles else Compile.NONE, float8=float8,
    )  # fmt: skip


def linear(of: OpPricer, number: int) -> Op:
    return op_of(of, layer_of(of, "Block"), "linear", number)


def test_linear_layers_inside_blocks_are_in_float8_and_the_head_is_not() -> None:
    graph, _, layers = known(*LLAMA)
    paths = list(float8_linears(graph, layers, Float8.ROWWISE).values())
    assert len(paths) == 14
    assert paths[:2] == ["layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"]
    assert "lm_head" not in paths


def test_sizes_that_are_no_multiples_of_16_are_refused_if_no_others_are_there() -> None:
    graph, _, layers = known("gpt2.py", "layers=2", "dim=72", "heads=4")
    assert float8_linears(graph, layers, Float8.ROWWISE) == {}
    check_float8_sizes(graph, layers, asked(float8="none"))
    with pytest.raises(InputError, match="no linear layer can multiply in float8") as caught:
        check_float8_sizes(graph, layers, asked(float8="rowwise"))
    assert "sizes are multiples of 16" in str(caught.value)


def test_a_product_runs_at_the_peak_of_float8_and_its_factors_are_cast() -> None:
    of = prices(Float8.TENSORWISE)
    up, gate = (linear(of, number) for number in (5, 4))
    assert of.rates.float8.peak_flops_per_second == 1979e12
    product = gemm_seconds(ROWS, FFN, WIDE, rates=of.rates.float8, element_bytes=1)
    weight, source = WIDE * FFN, ROWS * WIDE
    # forward: the weight's largest element (2 bytes read), the cast (2 read, 1 written); of the
    # input, which gate and up share, the same with a second copy of other contiguous rows
    alone = memory_seconds(5 * weight, rates=of.rates.own)
    both = memory_seconds(5 * weight + 6 * source, rates=of.rates.own)
    assert of.cost(up).forward_seconds == pytest.approx(product + alone)
    assert of.cost(gate).forward_seconds == pytest.approx(product + both)
    # backward: the result's gradient as the input, the weight is cast again (2 + 1); up's kernel
    # adds the input's gradient to that of gate: it reads one more
    cast = memory_seconds(3 * weight + 6 * ROWS * FFN, rates=of.rates.own)
    own = gemm_seconds(ROWS, WIDE, FFN, rates=of.rates.float8, element_bytes=1)
    learned = gemm_seconds(
        WIDE, FFN, ROWS, rates=of.rates.float8, element_bytes=1, contiguous=WIDE | FFN
    )
    added = memory_seconds(2 * source, rates=of.rates.own)
    assert of.cost(up).backward_seconds == pytest.approx(own + learned + cast + added)


def test_factors_in_blocks_are_cast_where_they_are_multiplied() -> None:
    of = prices(Float8.MXFP8, name="b200")
    up, gate = (linear(of, number) for number in (5, 4))
    assert of.rates.float8.peak_flops_per_second == 4500e12
    weight, source, result = WIDE * FFN, ROWS * WIDE, ROWS * FFN
    product = gemm_seconds(ROWS, FFN, WIDE, rates=of.rates.float8, element_bytes=1)
    # forward: blocks along the rows of the weight and of the input, which gate and up share: 2
    # bytes are read and 1 is written, and a scale of 1 byte for each 32 elements
    each = 2 + 1 + 1 / 32
    assert of.cost(up).forward_seconds == pytest.approx(
        product + memory_seconds(each * weight, rates=of.rates.own)
    )
    assert of.cost(gate).forward_seconds == pytest.approx(
        product + memory_seconds(each * (weight + source), rates=of.rates.own)
    )
    # backward: the result's gradient in both directions, the weight and the input along columns
    own = gemm_seconds(ROWS, WIDE, FFN, rates=of.rates.float8, element_bytes=1)
    learned = gemm_seconds(
        WIDE, FFN, ROWS, rates=of.rates.float8, element_bytes=1, contiguous=WIDE | FFN
    )
    cast = memory_seconds(each * (2 * result + weight + source), rates=of.rates.own)
    assert of.cost(gate).backward_seconds == pytest.approx(own + learned + cast)
    # input and weight are saved as in bf16, and their casts exist while the backward runs
    plain = prices(Float8.NONE, name="b200")
    assert of.kept(gate).names == plain.kept(gate).names
    assert of.float8_bytes(gate, None) == (2 * result + source + weight) * 33 // 32


def test_blocks_of_32_do_not_suit_shards_of_48_rows() -> None:
    case = ("llama.py", "layers=2", "dim=96", "heads=6", "ffn=192")
    of = prices(Float8.MXFP8, *case, name="b200")
    up = linear(of, 5)
    assert of.float8_bytes(up, None) > 0
    assert of.float8_bytes(up, letter_along(of, up, "ffn", degree=2)) > 0  # 96 rows each
    assert of.float8_bytes(up, letter_along(of, up, "ffn", degree=4)) == 0
    rows = prices(Float8.ROWWISE, *case, name="b200")
    assert rows.float8_bytes(up, letter_along(rows, up, "ffn", degree=4)) > 0


def test_one_scale_for_a_tensor_is_faster_than_one_for_each_row_and_both_than_bf16() -> None:
    plain, rows, tensors = (prices(one) for one in (Float8.NONE, Float8.ROWWISE, Float8.TENSORWISE))
    seconds = [
        of.cost(linear(of, 6)).forward_seconds + of.cost(linear(of, 6)).backward_seconds
        for of in (tensors, rows, plain)
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] / seconds[0] > 1.5


def test_a_layer_has_room_for_the_factors_in_float8_of_its_largest_product() -> None:
    plain, tensors = (prices(one) for one in (Float8.NONE, Float8.TENSORWISE))
    without, room = (
        max(working_bytes(flow, one) for one in flow.ops)
        for flow in (flow_of(plain), flow_of(tensors))
    )
    # gate: the result and its gradient's two copies (2 + 2), the input's gradient and the input
    # (2 + 1), the weight (1); in bf16 the product of gate and up, with both gradients, is the most
    assert without == 3 * 2 * ROWS * FFN
    assert room == max(without, 4 * ROWS * FFN + 3 * ROWS * WIDE + WIDE * FFN)
    # down: its input's gradient is as wide as ffn
    assert tensors.float8_bytes(linear(tensors, 6), None) == (
        2 * ROWS * WIDE + ROWS * FFN + WIDE * FFN
    )


def test_the_weights_of_a_layers_products_can_be_gathered_in_float8() -> None:
    # q and o, k and v, the three of the feed-forward; two norms stay in 16 bits
    weights = 2 * WIDE * WIDE + 2 * WIDE * WIDE // 4 + 3 * WIDE * FFN
    for float8, elements in ((Float8.NONE, 0), (Float8.TENSORWISE, weights)):
        own = layer_parameters(flow_of(prices(float8)), {}, UNSHARED)
        assert sum(size for _, size in own.float8_weights) == elements
        assert all(size % rows == 0 for rows, size in own.float8_weights)
        assert own.parameter_bytes == 2 * (weights + 2 * WIDE)


def flow_of(of: OpPricer) -> LayerFlow:
    layer = layer_of(of, "Block")
    return layer_flow(of, layer, whole(layer), degree=1, shape=shape(1), parameters={}, outside={})


def test_nothing_is_in_float8_without_being_compiled() -> None:
    eager, asked = (prices(one, compiles=False) for one in (Float8.NONE, Float8.TENSORWISE))
    assert [eager.cost(op) for op in eager.graph.ops] == [asked.cost(op) for op in asked.graph.ops]


def test_a_shard_whose_bias_is_added_after_the_sum_is_not_in_float8() -> None:
    case = ("gpt2.py", "size=124m", "layers=2")
    of, plain = prices(Float8.TENSORWISE, *case), prices(Float8.NONE, *case)
    up, down = (linear(of, number) for number in (2, 3))
    assert of.cost(down) != plain.cost(down)
    for op, is_cast in ((up, True), (down, False)):
        split = letter_along(of, op, "ffn", degree=2)
        assert (of.cost(op, split) != plain.cost(op, split)) is is_cast


def asked(**places: object) -> Constraints:
    return constraints_of(
        declare(place, value, origin=f"--{place}", where=place) for place, value in places.items()
    )


def test_devices_without_such_units_are_refused() -> None:
    check_float8(choose_cluster(8, "h100"), asked(float8="tensorwise"))
    check_float8(choose_cluster(8, "a100"), asked(float8="none"))
    for name in ("b200", "gb200", "b300", "gb300"):
        check_float8(choose_cluster(8, name), asked(float8="mxfp8"))
    for name, scales in (("a100", "tensorwise"), ("h100", "mxfp8"), ("mi355x", "mxfp8")):
        with pytest.raises(InputError, match=rf"{name}.* has no units .* in float8, {scales}"):
            check_float8(choose_cluster(8, name), asked(float8=scales))
    with pytest.raises(InputError, match="has them: b200-sxm, gb200, b300-sxm, gb300"):
        check_float8(choose_cluster(8, "h100"), asked(float8="mxfp8"))


@pytest.mark.parametrize(
    ("float8", "other"),
    [
        ("rowwise", {"compile": "none"}),
        ("rowwise", {"precision": "fp32"}),
        ("mxfp8", {"precision": "fp16"}),  # torchao's kernels take and make bf16 alone
    ],
)
def test_float8_is_compiled_and_in_16_bits(float8: str, other: dict[str, str]) -> None:
    assert asked(float8=float8).compile == "layers"
    assert asked(float8="rowwise", precision="fp16").compile == "layers"
    with pytest.raises(InputError, match=rf"float8 {float8} \(--float8\).* exclude each other"):
        asked(float8=float8, **other)


def test_scripts_have_the_scalings_that_are_priced() -> None:
    assert {name: (one.multiple, one.gathers) for name, one in SCALINGS.items()} == {
        one.value: (one.multiple, one.gathers) for one in Float8 if one is not Float8.NONE
    }
