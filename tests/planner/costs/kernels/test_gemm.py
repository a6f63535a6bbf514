"""Tests of the seconds of matrix products."""

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.costs.kernels.kernels import gemm_seconds
from autopar.planner.costs.kernels.rates import Tile
from tests.planner.costs.kernels.compute_factories import real_rates, round_rates

extents = st.integers(1, 20_000)


def test_a_short_wave_costs_as_much_as_a_full_one() -> None:
    # 1000 × 400 in tiles of 100 × 100: 40 tiles on 100 units, one wave. Depth 8000: 8000 · 20 ns =
    # 160 us, + 3 us of the wave. Power: 2·1000·400·8000 ÷ 50e12 = 128 us. Stored 0.8 MB ÷ 0.5 TB/s
    # = 1.6 us, half exposed. 1 + 163 + 0.8 = 164.8 us.
    seconds = gemm_seconds(1000, 400, 8000, rates=round_rates())
    assert seconds == pytest.approx(164.8e-6)


def test_one_row_too_many_starts_a_wave() -> None:
    # 11 · 10 tiles on 100 units: two waves of 160 us + 2 · 3 us = 326 us, more than the power's
    # 2·1010·1000·8000 ÷ 50e12 = 323.2 us; stored 2.02 MB ÷ 0.5 TB/s = 4.04 us, half exposed.
    assert gemm_seconds(1010, 1000, 8000, rates=round_rates()) == pytest.approx(329.02e-6)


def test_a_cheap_balance_spares_the_second_wave() -> None:
    # 110 tiles evened out: 1.1 · 160 us + 10 us of traffic + 6 us = 192 us, where 320 us were whole
    # waves; with all the power that is needed, 1 + 192 + 2.02 us.
    tile = Tile(rows=100, columns=100, seconds_per_depth=20e-9, balance_seconds=10e-6)
    rates = round_rates(tiles=(tile,), sustained_flops_per_second=100e12)
    assert gemm_seconds(1010, 1000, 8000, rates=rates) == pytest.approx(195.02e-6)


def test_a_full_device_is_bound_by_its_power() -> None:
    # 100 tiles, one wave of 160 us + 3; power 2·1000·1000·8000 ÷ 50e12 = 320 us; stored 2 MB: 4 us,
    # half exposed.
    assert gemm_seconds(1000, 1000, 8000, rates=round_rates()) == pytest.approx(323e-6)


def test_a_skinny_product_is_bound_by_its_operands() -> None:
    # 1 × 8000 by 8000 × 8000: (1 + 8000)·8000·2 bytes + 16,000 = 128.032 MB ÷ 0.5 TB/s = 256.064
    # us; tiles: 80, one wave, 163 us; stored 16 kB ÷ 0.5 TB/s · 0.5 = 0.016 us; launch 1.
    assert gemm_seconds(1, 8000, 8000, rates=round_rates()) == pytest.approx(257.08e-6)


def test_an_odd_vocabulary_is_slower_than_a_padded_one() -> None:
    rates = real_rates()
    odd = gemm_seconds(8192, 50257, 768, rates=rates)
    padded = gemm_seconds(8192, 50304, 768, rates=rates)
    assert odd > 1.5 * padded


def test_experts_in_one_kernel_share_waves() -> None:
    # 10 experts of 10 tiles each: one wave together, bound by power, 2·10·100·1000·8000 ÷ 50e12 =
    # 320 us, or ten waves of 163 us apart. Stored 2 MB ÷ 5 TB/s = 0.4 us, half exposed.
    rates = round_rates(stream_bytes_per_second=5e12)
    together = gemm_seconds(100, 1000, 8000, rates=rates, batch=10)
    apart = 10 * gemm_seconds(100, 1000, 8000, rates=rates)
    assert together == pytest.approx(321.2e-6)
    assert apart == pytest.approx(10 * (1 + 163 + 0.02) * 1e-6)


def test_large_products_reach_what_the_power_of_an_a100_allows() -> None:
    # 300 W ÷ 1.275 pJ = 235 TFLOP/s; measured 234.1 for 4096 × 24576 × 5120 (SimuMax).
    seconds = gemm_seconds(4096, 24576, 5120, rates=real_rates())
    assert 2 * 4096 * 24576 * 5120 / seconds == pytest.approx(234.1e12, rel=0.02)


def test_a_core_of_a_cpu_is_a_device_like_any_other() -> None:
    # 103 GFLOP/s measured at 512³ on one core; 1024³ took 22.05 ms there.
    rates = real_rates(
        architecture="cpu",
        peak=103e9,
        memory_bytes_per_second=35e9,
        launch_seconds=1e-6,
        power_watts=None,
    )
    seconds = gemm_seconds(1024, 1024, 1024, rates=rates, element_bytes=4, stored_bytes=4)
    assert seconds == pytest.approx(22.05e-3, rel=0.1)


def test_a_call_takes_few_microseconds() -> None:
    # The search asks for thousands of shapes; about 2 us here, 5 us asked for, room for a busy
    # machine.
    rates = real_rates()
    calls = 2_000
    runs = timeit.repeat(
        lambda: gemm_seconds(4096, 5120, 1536, rates=rates), number=calls, repeat=5
    )
    assert min(runs) / calls < 15e-6


@given(extents, extents, extents, st.integers(1, 64))
def test_no_product_beats_the_data_sheet(m: int, n: int, k: int, batch: int) -> None:
    rates = real_rates(power_watts=None)
    computed = 2.0 * batch * m * n * k / rates.peak_flops_per_second
    moved = 2.0 * batch * ((m + n) * k + m * n) / rates.sheet_bytes_per_second
    assert gemm_seconds(m, n, k, rates=rates, batch=batch) >= max(computed, moved)
