"""The constants of frameworks that come with autopar."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.cluster import HostShare
from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.costs.steps.framework import (
    from_host_byte_seconds,
    host_optimizer_seconds,
    read_framework_constants,
    to_host_byte_seconds,
)
from tests.planner.costs.step_factories import ARRANGEMENT, SILENT


def test_all_constants_are_read_with_their_units() -> None:
    constants = read_framework_constants()
    assert 0 < constants.action_seconds < constants.step_seconds < 0.1
    assert 0 < constants.overlap_slowdown < 1
    assert 0 < constants.margin < 1
    assert constants.context_bytes > 2**29


HOST = HostShare(memory_bytes=10**12, memory_bytes_per_second=100e9, bytes_per_second=10e9)
RAW = replace(SILENT, host_memory_share=0.5, host_link_share=0.8)  # 50 and 8 GB/s
ON_HOST = replace(ARRANGEMENT, offload=Offload.OPTIMIZER)


def test_the_host_steps_at_the_rate_of_its_memory_and_sends_weights_of_16_bits() -> None:
    # 10^9 parameters: 40 bytes at 50 GB/s are 0.8 s; 2 bytes at 8 GB/s are 0.25 s, longer than the
    # cast's 6 bytes at 50 GB/s
    assert host_optimizer_seconds(1e9, ON_HOST, RAW, HOST) == pytest.approx(1.05)
    sharded = replace(ON_HOST, data=2, shard=2, zero=Zero.PARAMETERS)
    assert host_optimizer_seconds(1e9, sharded, RAW, HOST) == pytest.approx(0.8)


def test_gradients_of_later_microbatches_are_added_on_the_host() -> None:
    assert to_host_byte_seconds(ARRANGEMENT, RAW, HOST) == 0
    assert to_host_byte_seconds(ON_HOST, RAW, HOST) == pytest.approx(1 / 8e9)
    # 3 of 4 microbatches are added: 3 bytes of traffic for a byte
    several = replace(ON_HOST, microbatches=4)
    assert to_host_byte_seconds(several, RAW, HOST) == pytest.approx(1 / 8e9 + 3 * 0.75 / 50e9)


def test_fully_shard_fetches_fp32_for_each_gather_of_16_bits() -> None:
    assert from_host_byte_seconds(ON_HOST, RAW, HOST) == 0
    sharded = replace(ON_HOST, data=2, shard=2, zero=Zero.PARAMETERS)
    assert from_host_byte_seconds(sharded, RAW, HOST) == pytest.approx(2 / 8e9)
