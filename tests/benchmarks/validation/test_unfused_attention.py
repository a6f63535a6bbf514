"""Attention whose scores lie in memory costs more than a fused kernel."""

from __future__ import annotations

import pytest

from autopar.planner.costs.kernels.kernels import (
    fused_attention_backward_seconds,
    fused_attention_forward_seconds,
)
from benchmarks.validation.unfused_attention import (
    unfused_attention_backward_seconds,
    unfused_attention_forward_seconds,
)
from tests.planner.costs.kernels.compute_factories import attention, real_rates, round_rates


def test_unfused_attention_writes_its_scores() -> None:
    # 10 heads · 1000² scores of 2 bytes. Softmax: 2 passes · 20 MB ÷ 0.5 TB/s = 80 us; dropout: 5
    # bytes · 1e7 ÷ 0.5 TB/s = 100 us; a launch each.
    rates = round_rates()
    shape = attention(1000, 10, head_dim=96, value_dim=96)
    plain = unfused_attention_forward_seconds(shape, rates=rates)
    dropped = unfused_attention_forward_seconds(shape, rates=rates, dropout=0.1)
    masked = unfused_attention_forward_seconds(shape, rates=rates, score_passes=2)
    assert dropped - plain == pytest.approx(101e-6)
    assert masked - plain == pytest.approx(81e-6)
    assert plain > 81e-6


def test_fused_attention_beats_unfused_on_long_sequences() -> None:
    shape, rates = attention(8192), real_rates()
    fused = fused_attention_forward_seconds(shape, rates=rates)
    assert fused < unfused_attention_forward_seconds(shape, rates=rates)
    back = fused_attention_backward_seconds(shape, rates=rates)
    assert back < unfused_attention_backward_seconds(shape, rates=rates)
