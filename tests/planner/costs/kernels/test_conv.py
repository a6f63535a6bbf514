"""Tests of the seconds of convolutions."""

from dataclasses import replace

import pytest

from autopar.planner.costs.kernels.kernels import (
    ConvolutionShape,
    convolution_forward_seconds,
    convolution_input_gradient_seconds,
    convolution_weight_gradient_seconds,
    layout_change_seconds,
)
from tests.planner.costs.kernels.compute_factories import real_rates, round_rates

SHAPE = ConvolutionShape(
    batch=10,
    in_channels=100,
    out_channels=100,
    input_size=(100, 100),
    output_size=(100, 100),
    kernel_size=(3, 3),
)


def test_a_convolution_is_a_product_over_channels_and_taps() -> None:
    # 100,000 × 900 by 900 × 100: power 2·1e5·900·100 ÷ 50e12 = 360 us; 1000 tiles in 10 waves of
    # 900 · 20 ns = 180 us + 30 us; traffic 2 · 20 MB ÷ 0.5 TB/s = 80 us. Depth 900 is no multiple
    # of 8 elements but moves no bytes here.
    assert convolution_forward_seconds(SHAPE, rates=round_rates()) == pytest.approx(361e-6)


def test_gradients_do_the_work_of_the_forward() -> None:
    # Input gradient: 100,000 × 900 by 900 × 100, the same product. Weight gradient: 100 × 100,000
    # by 100,000 × 900: 9 tiles in one wave, 100,000 · 20 ns = 2 ms + 3 us: no unit helps another on
    # this device without evening out.
    rates = round_rates()
    assert convolution_input_gradient_seconds(SHAPE, rates=rates) == pytest.approx(361e-6)
    assert convolution_weight_gradient_seconds(SHAPE, rates=rates) == pytest.approx(2004e-6)


def test_a_real_device_evens_out_the_weight_gradient() -> None:
    rates = real_rates()
    forward = convolution_forward_seconds(SHAPE, rates=rates)
    assert convolution_weight_gradient_seconds(SHAPE, rates=rates) < 8 * forward


def test_a_strided_input_gradient_spreads_the_work_over_the_inputs() -> None:
    # Stride 2: a quarter of the output positions, so depth 900 ÷ 4 = 225 for each input position:
    # power 2·1e5·225·100 ÷ 50e12 = 90 us; 10 waves of 225 · 20 ns + 3 us = 75 us. Traffic 25 MB ÷
    # 0.5 TB/s = 50 us.
    strided = replace(SHAPE, output_size=(50, 50))
    seconds = convolution_input_gradient_seconds(strided, rates=round_rates())
    assert seconds == pytest.approx(91e-6)


def test_a_depthwise_convolution_is_bound_by_its_bytes() -> None:
    # 40 MB ÷ (0.4 · 0.5 TB/s) = 200 us.
    depthwise = replace(SHAPE, groups=100)
    seconds = convolution_forward_seconds(depthwise, rates=round_rates())
    assert seconds == pytest.approx(201e-6, rel=1e-4)


def test_channels_first_rewrites_input_and_output() -> None:
    # 20 MB each, read and written: 2 · 40 MB ÷ 0.5 TB/s = 160 us and two launches.
    assert layout_change_seconds(SHAPE, rates=round_rates()) == pytest.approx(162e-6)
