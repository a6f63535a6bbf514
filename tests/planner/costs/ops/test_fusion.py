"""Tests of compiled layers: torch's own partitioner saves as much, and bytes are those by hand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.planner.costs.kernels.kernels import memory_seconds
from autopar.planner.costs.layers.flow import layer_flow
from autopar.planner.costs.layers.layer import kept_places, layer_costs
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Recompute
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Compile, Layer
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from tests.planner.costs.ops.op_factories import device, known, layer_of, pricer, shape, whole
from tests.planner.subjects import ZOO

ROWS = 4
LLAMA = ("llama.py", "size=tiny")


def compiled(*case: str, name: str = "h100", precision: Precision = Precision.BF16) -> OpPricer:
    graph, axes, layers = known(*case)
    return OpPricer(
        graph, axes, batch=ROWS, precision=precision, device=device(name), layers=layers,
        compile_=Compile.LAYERS,
    )  # fmt: skip


def cost_of(prices: OpPricer, layer: Layer, mode: Recompute = Recompute.NONE) -> LayerCost:
    costs = layer_costs(
        prices, layer, whole(layer), degree=1, shape=shape(1), parameters={}, outside={}
    )
    return costs[mode]


def layer_at(prices: OpPricer, path: str) -> Layer:
    calls = prices.graph.calls
    return next(one for one in prices.layers.layers if calls[one.call].path == path)


def saved_by_torch(case: tuple[str, ...], path: str) -> int:
    """Bytes that a compiled layer keeps for its backward, weights aside."""
    torch.compiler.reset()
    file = load_model_file(str(ZOO / case[0]), case[1:])
    model, batch = file.build_model(), file.example_batch(ROWS)
    held = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    layer, found, kept = model.get_submodule(path), dict[int, int](), list[Tensor]()
    forward = torch.compile(layer.forward, backend="aot_eager_decomp_partition", dynamic=False)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no other tensor gets its address
        return tensor

    def recorded(*given: object, **named: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            return forward(*given, **named)  # type: ignore[no-untyped-call]

    layer.forward = recorded
    model(**{key: one for key, one in batch.items() if key in taken(model)})
    return sum(found.values())


def taken(model: nn.Module) -> Iterator[str]:
    return iter(inspect.signature(type(model).forward).parameters)


CELLS = [
    pytest.param(LLAMA, "layers.1", 0.01, id="Llama"),
    pytest.param(("resnet.py", "size=tiny"), "blocks.1", 0.05, id="ResNet"),  # a mask of a ReLU
    *(
        pytest.param(case, path, 0.01, id=name, marks=pytest.mark.more_cells)
        for name, case, path in (
            ("GPT-2", ("gpt2.py", "size=tiny", "dropout=0"), "h.1"),
            ("BERT", ("bert.py", "size=tiny", "dropout=0"), "layers.1"),
            ("ViT", ("vit.py", "size=tiny"), "layers.1"),
        )
    ),
]


@pytest.mark.parametrize(("case", "path", "apart"), CELLS)
def test_a_compiled_layer_saves_what_torchs_partitioner_saves(
    case: tuple[str, ...], path: str, apart: float
) -> None:
    prices = compiled(*case, name="cpu", precision=Precision.FP32)
    layer = layer_at(prices, path)
    flow = layer_flow(
        prices, layer, whole(layer), degree=1, shape=shape(1), parameters={}, outside={}
    )
    assert sum(kept_places(flow).values()) == pytest.approx(saved_by_torch(case, path), rel=apart)


def test_a_gated_unit_reads_two_tensors_and_writes_one() -> None:
    prices = compiled(*LLAMA)
    layer = layer_at(prices, "layers.1")
    silu, product = op_named(layer, "silu"), op_named(layer, "mul", -1)
    one = prices.graph.tensors[product.outputs[0]].numel.at(ROWS) * 2  # bytes, in bf16

    def of(moved: int, *, launches: bool) -> float:
        rates = prices.rates.own
        return memory_seconds(moved, rates=rates) - (not launches) * rates.launch_seconds

    # Forward: gate; up and the result. Backward: gate and its gradient; the result's, up, up's.
    assert prices.cost(silu).forward_seconds == pytest.approx(of(one, launches=True))
    assert prices.cost(product).forward_seconds == pytest.approx(of(2 * one, launches=False))
    assert prices.cost(silu).backward_seconds == pytest.approx(of(2 * one, launches=True))
    assert prices.cost(product).backward_seconds == pytest.approx(of(3 * one, launches=False))
    assert prices.launches(silu) == (1, 1)
    assert prices.launches(product) == (0, 0)


def op_named(layer: Layer, kind: str, number: int = 0) -> Op:
    return [op for op in layer.ops if op.target.split(".")[1] == kind][number]


def test_between_a_sum_and_its_norm_nothing_is_read_again() -> None:
    prices = compiled(*LLAMA)
    layer = layer_at(prices, "layers.1")
    added, norm = op_named(layer, "add", 2), op_named(layer, "rms_norm", 1)
    fused = prices.fusion.ops
    assert len(fused[added.name].reads) == 2
    assert added.outputs[0] in fused[added.name].writes  # the next sum reads it
    assert fused[norm.name].reads == (norm.inputs[1],)  # the weight alone


@pytest.mark.parametrize("case", [LLAMA, ("gpt2.py", "size=124m"), ("vit.py", "size=b16")])
def test_compiling_makes_no_layer_slower_or_larger(case: tuple[str, ...]) -> None:
    eager, prices = pricer(*case, batch=ROWS, device_name="h100"), compiled(*case)
    for layer in prices.layers.layers:
        for mode in (Recompute.NONE, Recompute.FULL):
            before, after = cost_of(eager, layer, mode), cost_of(prices, layer, mode)
            assert after.saved_bytes <= before.saved_bytes
            assert after.forward_seconds <= before.forward_seconds
            if mode is Recompute.NONE:  # a compiled layer runs again to its end
                assert after.backward_seconds <= before.backward_seconds


def test_products_of_an_unaligned_vocabulary_are_padded() -> None:
    case = ("gpt2.py", "size=124m")
    eager, prices = pricer(*case, device_name="h100"), compiled(*case)
    head = op_named(layer_at(prices, "lm_head"), "linear")
    assert prices.cost(head).forward_seconds < 0.5 * eager.cost(head).forward_seconds
    block = op_named(layer_of(prices, "Block"), "linear")  # 768 wide
    assert prices.cost(block) == eager.cost(block)
