"""Tests of the roofs that every compute formula stands on."""

import pytest

from autopar.planner.costs.kernels.rates import (
    aligned_share,
    read_compute_constants,
    sustained_fraction,
)
from autopar.planner.costs.ops.measurements import Host
from autopar.planner.errors import InputError
from tests.planner.costs.kernels.compute_factories import real_rates

ALIGNMENT = ((16, 1.0), (8, 0.5), (2, 0.25))


def test_power_limits_the_sustained_rate() -> None:
    # 300 W ÷ 1.5 pJ = 200 TFLOP/s, of 400: one half.
    assert sustained_fraction(300, 400e12, 1.5e-12) == pytest.approx(0.5)


def test_the_power_fraction_of_16_bit_serves_8_bit() -> None:
    half, eighth = real_rates(), real_rates(dtype="fp8")
    ratio = eighth.sustained_flops_per_second / half.sustained_flops_per_second
    assert ratio == pytest.approx(2.0)


def test_tiles_know_their_times() -> None:
    # A100: 128 × 256 with half_tile h = 16: 2·128·256 FLOPs · (1 + 16·(1/128 + 1/256)) ÷ (312e12 ÷
    # 108) = 65,536 · 1.1875 ÷ 2.8889e12 = 26.94 ns per unit of depth.
    tile = real_rates().tiles[0]
    assert (tile.rows, tile.columns) == (128, 256)
    assert tile.seconds_per_depth == pytest.approx(26.94e-9, rel=2e-3)


def test_a_stated_multiprocessor_count_overrides_the_generation() -> None:
    assert real_rates().multiprocessors == 108
    assert real_rates(multiprocessors=56).multiprocessors == 56


def test_an_ultra_generation_is_found_under_its_family() -> None:
    constants = read_compute_constants()
    assert constants.architecture("Blackwell Ultra") is constants.architecture("blackwell")


def test_an_unknown_generation_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        real_rates(architecture="Hoper")
    assert "'Hoper' is not known" in str(caught.value)
    assert "did you mean 'hopper'?" in str(caught.value)


@pytest.mark.parametrize(
    ("contiguous", "element_bytes", "share"),
    [
        (50304, 2, 1.0),  # 50304 = 2^7 · 393: 256 bytes
        (50300, 2, 0.5),  # 4 · 12575: 8 bytes
        (50257, 2, 0.25),  # odd: 2 bytes
        (4096 | 50257, 2, 0.25),  # the worse of two extents
        (50300, 4, 1.0),  # 4 elements of 4 bytes
    ],
)
def test_alignment_is_the_lowest_set_bit(
    contiguous: int, element_bytes: float, share: float
) -> None:
    assert aligned_share(contiguous, element_bytes, ALIGNMENT) == share


@pytest.mark.parametrize(
    ("architecture", "columns", "share"),
    [
        ("Hopper", 50257, 0.15),
        ("Hopper", 50260, 0.34),
        ("Hopper", 50304, 1),
        ("Ampere", 50257, 0.35),
    ],
)
def test_devices_that_load_tiles_in_bulk_lose_more_by_unaligned_rows(
    architecture: str, columns: int, share: float
) -> None:
    rates = real_rates(architecture=architecture)
    assert aligned_share(columns, 2, rates.alignment) == share


def test_a_region_waits_for_the_slower_of_cpu_and_device() -> None:
    # 100 ops of 8 us: 800 us.
    host = Host(forward_seconds=8e-6, backward_seconds=9e-6, runs_ahead=True)
    assert host.forward_region_seconds(0.5e-3, 100) == pytest.approx(0.8e-3)
    assert host.backward_region_seconds(0.5e-3, 100) == pytest.approx(0.9e-3)
    assert host.forward_region_seconds(2e-3, 100) == 2e-3


def test_every_generation_has_fractions_between_zero_and_one() -> None:
    for name, facts in read_compute_constants().architectures.items():
        shares = (facts.stream_fraction, facts.attention_forward, facts.attention_backward)
        assert all(0 < share <= 1 for share in shares), name
