"""Tests of what runs again, against torch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.planner.costs.layers.flow import (
    LayerFlow,
    fully_recomputed_ops,
    layer_flow,
    recomputed_ops,
)
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import Recompute
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace.build import build
from autopar.runtime.recompute.running_again import ATTENTION, MATMULS, recompute
from benchmarks.validation.practice import Attention, Practice, PracticePricer
from tests.planner.costs.ops.op_factories import (
    device,
    known,
    layer_of,
    megatron,
    pricer,
    shape,
    weights,
    whole,
)

WEIGHTY = ("linear", "conv2d", "scaled_dot_product_attention")


def counted(name: str, calls: Counter[str]) -> Callable[..., Any]:
    """Return the function of this name, which counts how often it comes to its end."""
    function = getattr(nn.functional, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls[name] += 1
        return result

    return call


def flow_of(prices: OpPricer, name: str) -> LayerFlow:
    """Return the first layer of a class, not split."""
    layer = layer_of(prices, name)
    return layer_flow(
        prices, layer, whole(layer), degree=1, shape=shape(1), parameters={}, outside={}
    )


@pytest.mark.parametrize(
    ("case", "block"),
    [
        (("gpt2.py", "dropout=0.0"), "Block"),
        (("gpt2.py", "dropout=0.1"), "Block"),
        (("llama.py",), "Block"),
        (("bert.py",), "Block"),
        (("t5.py",), "EncoderBlock"),
        (("resnet.py", "size=tiny"), "BasicBlock"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_a_layer_runs_again_up_to_what_its_backward_needs_as_torch_runs_it(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...], block: str
) -> None:
    subject = build(
        load_model_file(f"models_zoo/{case[0]}", case[1:]), device="cpu", dtype=None, batch_size=2
    )
    chosen = next(one for one in subject.step.modules() if type(one).__name__ == block)
    recompute(chosen, "full")
    loss = subject.step.run(subject.batch)
    calls = Counter[str]()
    with monkeypatch.context() as patched:
        for name in WEIGHTY:
            patched.setattr(nn.functional, name, counted(name, calls))
        loss.backward()  # type: ignore[no-untyped-call]
    again = fully_recomputed_ops(flow_of(pricer(*case, device_name="cpu"), block))
    found = Counter(one.op.target.split(".")[1] for one in again.ops)
    assert calls.total() > 0
    assert {name: found[name] for name in WEIGHTY} == {name: calls[name] for name in WEIGHTY}


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products, convolutions and fused attentions."""

    count: int = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.name().removeprefix("aten::").split(".")[0] in MATMULS + ATTENTION
        return func(*args, **(kwargs or {}))


def products_in_backward(case: tuple[str, ...], block: str, mode: Any) -> int:
    """Return how many products torch runs in the backward, if one block is recomputed."""
    subject = build(
        load_model_file(f"models_zoo/{case[0]}", case[1:]), device="cpu", dtype=None, batch_size=2
    )
    recompute(next(one for one in subject.step.modules() if type(one).__name__ == block), mode)
    loss = subject.step.run(subject.batch)
    products = Products()  # type: ignore[no-untyped-call]
    with products:
        loss.backward()  # type: ignore[no-untyped-call]
    return products.count


@pytest.mark.parametrize("mode", [Recompute.SELECTIVE, Recompute.FULL])
@pytest.mark.parametrize(
    ("case", "block"),
    [
        (("gpt2.py", "dropout=0.0"), "Block"),
        (("llama.py",), "Block"),
        (("bert.py", "dropout=0.0"), "Block"),
        (("resnet.py", "size=tiny"), "BasicBlock"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_a_mode_saves_the_products_that_torch_does_not_run_again(
    case: tuple[str, ...], block: str, mode: Recompute
) -> None:
    flow = flow_of(pricer(*case, device_name="cpu"), block)
    again = [
        one for one in recomputed_ops(flow, mode).ops if one.op.target.split(".")[1] in WEIGHTY
    ]
    plain = products_in_backward(case, block, "none")
    assert products_in_backward(case, block, mode.value) == plain + len(again)


def test_an_op_that_keeps_what_it_makes_runs_again_and_what_follows_does_not() -> None:
    flow = flow_of(pricer("gpt2.py", "dropout=0.1"), "Block")
    last = [one.op.target for one in flow.ops[-2:]]
    assert last == ["aten.dropout.default", "aten.add.Tensor"]  # whose mask the backward needs
    assert fully_recomputed_ops(flow).ops == flow.ops[:-1]


def test_the_last_product_of_a_block_is_spared_and_the_sum_over_its_parts() -> None:
    prices = pricer("llama.py")
    layer = layer_of(prices, "Block")
    layouts = megatron(prices, layer)
    flow = layer_flow(
        prices,
        layer,
        layouts,
        degree=2,
        shape=shape(2),
        parameters=weights(layer, layouts, prices),
        outside={},
    )
    again = recomputed_ops(flow, Recompute.FULL)
    products = [one for one in flow.ops if one.op.target.startswith("aten.linear")]
    assert [one for one in products if one not in again.ops] == products[-1:]
    assert len(again.conversions) == len(flow.conversions) - 1


def test_published_frameworks_run_a_layer_to_its_end() -> None:
    graph, axes, layers = known("llama.py")
    own = pricer("llama.py")
    prices = PracticePricer(
        graph,
        axes,
        batch=4,
        precision=own.precision,
        device=device(),
        layers=layers,
        practice=Practice(attention=Attention.FUSED, is_loss_fused=True, fuses_gradients=True),
    )
    flow = flow_of(prices, "Block")
    assert recomputed_ops(flow, Recompute.FULL).ops == flow.ops
