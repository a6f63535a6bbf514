"""The constants of frameworks that come with autopar."""

from __future__ import annotations

from dataclasses import astuple

from autopar.planner.costs.steps.framework import read_framework_constants


def test_all_constants_are_read_with_their_units() -> None:
    constants = read_framework_constants()
    assert 0 < constants.action_seconds < constants.step_seconds < 0.1
    assert 0 < constants.overlap_slowdown < 1
    assert 0 < constants.margin < 1
    assert constants.context_bytes > 2**29
    assert all(0 < seconds < 0.01 for seconds in astuple(constants.host))
