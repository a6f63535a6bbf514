"""Tests of figures with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.toml_reading import (
    bandwidth_text,
    bytes_text,
    parse_bytes,
    parse_bytes_per_second,
    parse_flops_per_second,
    parse_seconds,
    parse_watts,
    seconds_text,
)
from autopar.planner.errors import InputError


def test_figures_are_read_as_people_write_them() -> None:
    assert parse_bytes("80 GiB", where="x") == 80 * 2**30
    assert parse_bytes("80GB", where="x") == 80 * 10**9
    assert parse_seconds("25 us", where="x") == pytest.approx(25e-6)
    assert parse_seconds("1.5 ms", where="x") == pytest.approx(1.5e-3)
    assert parse_bytes_per_second("450 GB/s", where="x") == 450e9
    assert parse_bytes_per_second("2.5e1 GB/s", where="x") == 25e9
    assert parse_flops_per_second("312 TFLOP/s", where="x") == 312e12
    assert parse_watts("700 W", where="x") == 700


def test_eight_bits_are_one_byte() -> None:
    # 400 · 10⁹ bits ÷ 8 = 50 · 10⁹ bytes
    assert parse_bytes_per_second("400 Gb/s", where="x") == 50e9
    assert parse_bytes_per_second("400 Gbps", where="x") == 50e9


@pytest.mark.parametrize(
    "value",
    [
        *(
            "80",
            80,
            80.5,
            "0 GiB",
            "-1 GiB",
            "inf GiB",
            "nan GiB",
            "1e999 GiB",
            "GiB",
            "",
            "80 parsecs",
        ),
        True,
        None,
        [],
        "80 GiB/s",
        "eighty GiB",
    ],
)
def test_a_figure_that_is_not_one_is_refused_at_its_place(value: object) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(value, where="memory")
    assert caught.value.where == "memory"
    assert "80 GiB" in caught.value.fix


@given(st.floats(min_value=1.0, max_value=1e15))
def test_text_reads_back_to_the_same_size(size: float) -> None:
    assert parse_bytes(bytes_text(size), where="x") == pytest.approx(size, rel=1e-3, abs=1.0)


@given(st.floats(min_value=1e-8, max_value=1e4))
def test_text_reads_back_to_the_same_time(seconds: float) -> None:
    assert parse_seconds(seconds_text(seconds), where="x") == pytest.approx(seconds, rel=1e-3)


@given(st.floats(min_value=1.0, max_value=1e15))
def test_text_reads_back_to_the_same_bandwidth(rate: float) -> None:
    assert parse_bytes_per_second(bandwidth_text(rate), where="x") == pytest.approx(rate, rel=1e-3)
