"""Errors and rank correlation, worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.validation.scoring import kendall_tau, score


def test_errors_are_relative_to_what_was_measured() -> None:
    # 10 % too high, 20 % too low, exact, 50 % too high.
    found = score([1.1, 0.8, 1.0, 3.0], [1.0, 1.0, 1.0, 2.0])
    assert found.median == pytest.approx(0.15)
    assert found.mean == pytest.approx(0.2)
    assert found.ninetieth == pytest.approx(0.5)
    assert found.bias == pytest.approx(0.05)
    assert found.reach == pytest.approx(1.25)


def test_95_percent_of_what_was_measured_is_within_reach() -> None:
    # Of 20 runs that took 1.01, 1.02, … 1.20 times what was predicted, 19 took at most 1.19 times.
    measured = [1 + number / 100 for number in range(20, 0, -1)]
    assert score([1.0] * 20, measured).reach == pytest.approx(1.19)


def test_one_swapped_pair_of_four_leaves_two_thirds() -> None:
    # 6 pairs: 5 agree, 1 does not.
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_ties_count_in_neither_order() -> None:
    # Pairs: (1,2) and (1,3) agree, (2,3) is tied in the first: 2 ÷ √(2 · 3).
    assert kendall_tau([1, 2, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)


def test_equal_figures_say_nothing_about_order() -> None:
    assert kendall_tau([1, 1, 1], [1, 2, 3]) == 0.0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12, unique=True))
def test_an_order_agrees_with_itself_and_opposes_its_reverse(values: list[float]) -> None:
    assert kendall_tau(values, values) == pytest.approx(1.0)
    assert kendall_tau(values, [-value for value in values]) == pytest.approx(-1.0)
