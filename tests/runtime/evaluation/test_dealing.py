"""Rows are dealt so that each counts once, and data ranks have as many microbatches each."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from autopar.runtime.evaluation.rows import Dealer


@pytest.mark.parametrize("each", [(1,), (4,), (7,), (2, 2), (6, 6, 6), (3, 1), (5, 12, 7)])
def test_every_row_counts_once_and_no_rank_waits_for_another(each: tuple[int, ...]) -> None:
    for rows in range(1, 4 * sum(each)):
        dealt = [list(Dealer(each=each, rank=rank).deal(range(rows))) for rank in range(len(each))]
        assert len({len(one) for one in dealt}) == 1
        counted: Counter[int] = Counter()
        for size, own in zip(each, dealt, strict=True):
            for numbers, times in own:
                assert len(numbers) == size
                for number in numbers if times else ():
                    counted[number] += Fraction(1, times)  # type: ignore[assignment]
        assert counted == dict.fromkeys(range(rows), 1)


def test_what_is_left_takes_few_microbatches() -> None:
    dealt = list(Dealer(each=(64,), rank=0).deal(range(3 * 64 + 40)))
    assert [(len(set(numbers)), times) for numbers, times in dealt[3:]] == [(32, 2), (8, 8)]


def test_rows_that_meet_are_never_repeated() -> None:
    dealer = Dealer(each=(2, 2), rank=1, fills=False)
    assert list(dealer.deal(range(7))) == [([2, 3], 1)]
