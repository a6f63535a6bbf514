"""Tests of the global batch that is chosen where none is declared."""

from __future__ import annotations

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.declared.limits import default_batch, with_batch
from tests.planner.plan.searches import declared
from tests.planner.subjects import zoo_graph


@pytest.mark.parametrize(
    ("devices", "tokens_per_row", "rows"),
    [
        (8, 8192, 64),
        (64, 8192, 512),  # 4 M tokens
        (512, 8192, 512),
        (1024, 8192, 1024),
        (16384, 8192, 2048),  # 16 M tokens
        (65536, 8192, 2048),
        (2048, 1024, 4096),
        (8, 2**25, 1),
        (8, 1, 64),
        (1024, 1, 8192),
        (65536, 1, 32768),
    ],
)
def test_the_default_batch_is_eight_rows_a_device_up_to_4_m_tokens_and_never_more_than_16_m(
    devices: int, tokens_per_row: int, rows: int
) -> None:
    assert default_batch(devices, tokens_per_row) == rows


@pytest.mark.parametrize("devices", [3, 12, 100, 384, 6144, 8 * 1009, 8 * 4099])
def test_the_default_batch_shares_most_factors_with_the_devices(devices: int) -> None:
    rows = default_batch(devices, 8192)
    shared_by = max(one for one in range(1, rows + 1) if devices % one == 0)
    assert rows % shared_by == 0
    assert min(8 * devices, 512) / 2 < rows <= 2048


def rows_of(**pins: object) -> int | None:
    graph = zoo_graph("gpt2.py", "size=124m")  # 1,024 tokens a row
    return with_batch(declared(**pins), choose_cluster(16, "a100-80gb-sxm"), graph).global_batch


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"pins__microbatch": 1},
        {"pins__microbatch": 4},
        {"pins__dp": 16, "pins__microbatch": 2},
        {"pins__pp": 2, "pins__tp": 2, "pins__microbatch": 8},
    ],
)
def test_pins_that_divide_the_default_batch_do_not_change_it(pins: dict[str, object]) -> None:
    assert rows_of(**pins) == 128


def test_pins_that_do_not_divide_the_default_batch_enlarge_it() -> None:
    assert rows_of(pins__microbatch=3) == 129
    assert rows_of(pins__dp=16, pins__microbatch=16) == 256
    assert rows_of(pins__pp=1, limits__tp=1, pins__microbatch=16) == 256
