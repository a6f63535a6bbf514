"""Tests of the seconds of norms: 0.5 TB/s, 100 multiprocessors, 1 us of launch."""

import pytest

from autopar.planner.cluster.sheet import find_device
from autopar.planner.costs.kernels.norms import (
    BatchNormShape,
    NormShape,
    batch_norm_backward_seconds,
    batch_norm_forward_seconds,
    fused_norm_seconds,
    norm_forward_seconds,
    norm_input_gradient_seconds,
    norm_weight_gradient_seconds,
)
from autopar.planner.costs.kernels.rates import rates_of
from autopar.planner.precision import Precision
from tests.planner.costs.kernels.compute_factories import round_rates

WIDE = NormShape(rows=10_000, width=1_000, element_bytes=2)  # 20 MB


def test_a_norm_waits_for_the_statistics_of_each_row() -> None:
    # 40 MB ÷ (0.5 · 0.5 TB/s) = 160 us; 10,000 rows · 0.1 us ÷ 100 multiprocessors = 10 us.
    assert norm_forward_seconds(WIDE, rates=round_rates()) == pytest.approx(171e-6)


def test_the_input_gradient_of_a_norm_moves_three_tensors() -> None:
    # 60 MB ÷ (0.8 · 0.5 TB/s) = 150 us.
    assert norm_input_gradient_seconds(WIDE, rates=round_rates()) == pytest.approx(151e-6)


@pytest.mark.parametrize(
    ("rows", "width", "microseconds"),
    [
        (10_000, 1_000, 101),  # 40 MB ÷ 0.4 TB/s
        (40_000, 100, 161),  # 16 MB would take 40 us; 40,000 rows of 4 ns one after another
        (100_000, 100, 101),  # over 65,536 rows, and 4 of 50 blocks: the rows are divided, 40 MB
        (100_000, 3_200, 3201),  # 100 blocks: not divided; 1.28 GB ÷ 0.4 TB/s
    ],
)
def test_the_weight_gradient_of_a_norm_takes_the_rows_one_after_another(
    rows: int, width: int, microseconds: float
) -> None:
    shape = NormShape(rows=rows, width=width, element_bytes=2)
    seconds = norm_weight_gradient_seconds(shape, rates=round_rates())
    assert seconds == pytest.approx(microseconds * 1e-6)


def test_kernels_of_frameworks_reach_the_bandwidth() -> None:
    # 2 passes of 20 MB forward: 80 us; 3 and 2 backward: 120 and 80 us.
    forward, backward = fused_norm_seconds(WIDE, rates=round_rates())
    assert forward == pytest.approx(81e-6)
    assert backward == pytest.approx(202e-6)


@pytest.mark.parametrize(
    ("channels", "plane", "forward", "backward"),
    [
        # 100 planes of 10,000 · 1 ns and 2 ns. A pass over all: 40 MB ÷ 0.2 TB/s = 200 us.
        (10, 10_000, 201 + 1001, 2001),
        # 400 of 800 channels run at once. Each plane takes 0.3 us: 100 · 0.3 · 2 = 60 us. A pass
        # over all: 32 MB ÷ 0.2 TB/s = 160 us. Backward: 80 MB ÷ 0.25 TB/s = 320 us.
        (800, 100, 161 + 61, 321),
    ],
)
def test_a_batch_norm_takes_each_channel_in_one_thread_block(
    channels: int, plane: int, forward: float, backward: float
) -> None:
    shape = BatchNormShape(
        images=100, channels=channels, plane=plane, element_bytes=2, is_native=True
    )
    rates = round_rates()
    assert batch_norm_forward_seconds(shape, rates=rates) == pytest.approx(forward * 1e-6)
    assert batch_norm_backward_seconds(shape, rates=rates) == pytest.approx(backward * 1e-6)


@pytest.mark.parametrize(
    ("channels", "plane", "measured_seconds"),
    # of an H200, forward and backward: benchmarks/results/on_gpu.md
    [(64, 112 * 112, 0.5429e-3), (256, 56 * 56, 0.4278e-3), (2048, 7 * 7, 0.0845e-3)],
)
def test_a_batch_norm_by_pixels_takes_what_an_h200_takes(
    channels: int, plane: int, measured_seconds: float
) -> None:
    shape = BatchNormShape(
        images=64, channels=channels, plane=plane, element_bytes=2, is_native=True, by_pixels=True
    )
    rates = rates_of(find_device("h200"), Precision.BF16).own
    taken = batch_norm_forward_seconds(shape, rates=rates)
    taken += batch_norm_backward_seconds(shape, rates=rates)
    assert taken == pytest.approx(measured_seconds, rel=0.25)
