"""Tests of the seconds of attention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.kernels.kernels import (
    causal_visible,
    fused_attention_backward_seconds,
    fused_attention_forward_seconds,
    whole_blocks,
)
from tests.planner.costs.kernels.compute_factories import attention, real_rates, round_rates


@pytest.mark.parametrize(
    ("length", "block", "visible"),
    [(128, 128, 1.0), (256, 128, 0.75), (4096, 128, 33 / 64), (100, 128, 1.0)],
)
def test_a_causal_mask_leaves_the_blocks_on_and_under_the_diagonal(
    length: int, block: int, visible: float
) -> None:
    assert causal_visible(length, block) == visible


def test_a_fused_forward_is_bound_by_its_kernel() -> None:
    # 4 · 1000² · 100 · 10 heads = 4 GFLOP at 0.5 · 100 TFLOP/s = 80 us; launch 1.
    shape = attention(1000, 10, head_dim=100, value_dim=100)
    assert fused_attention_forward_seconds(shape, rates=round_rates()) == pytest.approx(81e-6)


def test_a_fused_backward_does_two_and_a_half_times_the_work() -> None:
    # 10 GFLOP at 0.25 · 100 TFLOP/s = 400 us; launch 1.
    shape = attention(1000, 10, head_dim=100, value_dim=100)
    assert fused_attention_backward_seconds(shape, rates=round_rates()) == pytest.approx(401e-6)


@pytest.mark.parametrize(("length", "whole"), [(100, 100), (128, 128), (197, 256), (4096, 4096)])
def test_a_gpu_computes_whole_blocks_of_queries_and_keys(length: int, whole: int) -> None:
    assert whole_blocks(length, 128) == whole


def test_one_query_reads_its_keys() -> None:
    # Decoding: 8 heads · 1000 keys · 256 · 2 bytes = 4.096 MB, q and o 4.096 kB; ÷ 0.5 TB/s = 8.2
    # us; launch 1.
    shape = attention(1, 8, key_length=1000)
    assert fused_attention_forward_seconds(shape, rates=round_rates()) == pytest.approx(
        9.2e-6, rel=1e-3
    )


def test_an_a100_runs_causal_attention_as_measured() -> None:
    # SimuMax, A100-PCIe, 64 heads, 4096 × 4096, dims 128: 1.187 of 312 TFLOP/s, counted on the full
    # square.
    shape = attention(4096, 64, kv_heads=8, visible=causal_visible(4096, 128))
    measured = 4 * 128 * 64 * 4096**2 / (1.187 * 312e12)
    seconds = fused_attention_forward_seconds(shape, rates=real_rates())
    assert seconds == pytest.approx(measured, rel=0.06)


def test_fewer_key_heads_save_bytes_alone() -> None:
    rates = round_rates()
    long, grouped = attention(1000, 10), attention(1000, 10, kv_heads=2)
    same = fused_attention_forward_seconds(long, rates=rates)
    assert fused_attention_forward_seconds(grouped, rates=rates) == same
    few, fewer = attention(1, 8, key_length=1000), attention(1, 8, key_length=1000, kv_heads=1)
    one = fused_attention_forward_seconds(fewer, rates=rates)
    assert one < fused_attention_forward_seconds(few, rates=rates)


@given(st.integers(1, 8_192), st.integers(1, 64), st.sampled_from((64, 128, 192)))
def test_no_attention_beats_the_data_sheet(length: int, heads: int, dim: int) -> None:
    shape = attention(length, heads, head_dim=dim, value_dim=dim)
    bound = 4.0 * length**2 * dim * heads / 312e12
    assert fused_attention_forward_seconds(shape, rates=real_rates(power_watts=None)) >= bound
