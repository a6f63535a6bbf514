"""Percentages on a page add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.plan.telling.words import added_up


@pytest.mark.parametrize(
    ("shares", "percents"),
    [
        ([1 / 3, 1 / 3, 1 / 3], (34, 33, 33)),  # 33.3 three times: one of them gets the rest
        ([0.274, 0.711, 0.012, 0.003], (28, 71, 1, 0)),  # rounded one by one they are 99
        ([0.655, 0.335, 0.01], (66, 33, 1)),
        ([0.0, 1.0], (0, 100)),
        ([], ()),
    ],
)
def test_percents_add_up(shares: list[float], percents: tuple[int, ...]) -> None:
    assert added_up(shares) == percents


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=12))
def test_none_is_off_by_one_or_more(shares: list[float]) -> None:
    found = added_up(shares, units=1000)
    assert sum(found) == round(sum(share * 1000 for share in shares))
    assert all(abs(one - share * 1000) <= 1 for one, share in zip(found, shares, strict=True))
