"""Recurrent layers take the time of their steps; transposed convolutions that of a backward."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.planner.axes.infer import infer_axes
from autopar.planner.costs.kernels.kernels import gemm_seconds
from autopar.planner.costs.ops.measurements import OpCost
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from tests.planner.costs.ops.op_factories import device
from tests.planner.rules.multiplying_models import Subject

BATCH, STEPS = 16, 16


def pricer_of(subject: Subject, device_name: str = "a100") -> OpPricer:
    graph = trace(subject.file())
    return OpPricer(
        graph, infer_axes(graph), batch=BATCH, precision=Precision.FP32,
        device=device(device_name),
    )  # fmt: skip


def cost_of(prices: OpPricer, kind: str) -> OpCost:
    op = next(op for op in prices.graph.ops if op.target.startswith(f"aten.{kind}."))
    return prices.cost(op)


@pytest.mark.parametrize(("kind", "make", "gates"), [("lstm", nn.LSTM, 4), ("gru", nn.GRU, 3)])
def test_the_steps_of_a_recurrent_layer_follow_each_other(
    kind: str, make: type[nn.LSTM] | type[nn.GRU], gates: int
) -> None:
    prices = pricer_of(Subject(build=lambda: make(256, 512, batch_first=True), shape=(STEPS, 256)))
    step = gemm_seconds(BATCH, gates * 512, 512, rates=prices.rates.single, element_bytes=4,
                        stored_bytes=4)  # fmt: skip
    whole = gemm_seconds(STEPS * BATCH, gates * 512, 512, rates=prices.rates.single,
                         element_bytes=4, stored_bytes=4)  # fmt: skip
    forward = cost_of(prices, kind).forward_seconds
    assert forward > STEPS * step > 5 * whole


def test_twice_as_many_steps_take_twice_as_long() -> None:
    times = [
        cost_of(pricer_of(Subject(
            build=lambda: nn.LSTM(64, 64, batch_first=True), shape=(steps, 64))), "lstm")
        for steps in (8, 16)
    ]  # fmt: skip
    assert times[1].forward_seconds == pytest.approx(2 * times[0].forward_seconds, rel=0.1)
    assert times[1].backward_seconds == pytest.approx(2 * times[0].backward_seconds, rel=0.1)


def test_a_transposed_convolution_is_the_backward_of_the_other_way() -> None:
    there = cost_of(pricer_of(Subject(
        build=lambda: nn.Conv2d(64, 128, 4, stride=2, padding=1, bias=False), shape=(64, 28, 28),
        run=lambda conv, x: conv(x.requires_grad_())), "cpu"), "conv2d")  # fmt: skip
    back = cost_of(pricer_of(Subject(
        build=lambda: nn.ConvTranspose2d(128, 64, 4, stride=2, padding=1, bias=False),
        shape=(128, 14, 14)), "cpu"), "conv_transpose2d")  # fmt: skip
    # 2 · 16 · 14² · 128 · 64 · 4² FLOPs at 50 GFLOP/s are 16.4 ms, a little more with the tiles
    assert back.forward_seconds == pytest.approx(16.4e-3, rel=0.1)
    assert back.forward_seconds == pytest.approx(there.forward_seconds, rel=0.05)
    assert back.weight_gradient_seconds == pytest.approx(there.weight_gradient_seconds, rel=0.01)
