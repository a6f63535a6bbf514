"""The constants of frameworks that come with autopar."""

from __future__ import annotations

from dataclasses import astuple, replace

from autopar.planner.costs.framework import read_framework_constants
from tests.planner.costs.compute_factories import round_rates


def test_all_constants_are_read_with_their_units() -> None:
    constants = read_framework_constants()
    assert 0 < constants.action_seconds < constants.step_seconds < 0.1
    assert 0 < constants.overlap_slowdown < 1
    assert 0 < constants.margin < 1
    assert constants.context_bytes > 2**29
    assert all(0 < seconds < 0.01 for seconds in astuple(constants.host))


def test_a_unit_is_read_and_written_at_the_rate_of_memory_where_it_was_not_measured() -> None:
    constants, rates = read_framework_constants(), round_rates()
    by_rate = constants.unit_on(rates)
    assert by_rate.gather_byte_seconds == 2 / rates.stream_bytes_per_second
    assert by_rate.scatter_byte_seconds == by_rate.gather_byte_seconds
    own = replace(by_rate, gather_seconds=1e-3)
    assert replace(constants, unit=own).unit_on(rates) == own
