"""Turns shares of a whole into whole numbers that add up as the shares do."""

from __future__ import annotations

from collections.abc import Sequence


def added_up(shares: Sequence[float], *, units: int = 100) -> tuple[int, ...]:
    """Return shares in units, 100 for percents, that add up to what all shares are together.

    Of those that are rounded down, the ones with the largest remainders get one more.
    """
    exact = [share * units for share in shares]
    whole = [int(one) for one in exact]
    missing = round(sum(exact)) - sum(whole)
    largest_first = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    more = set(largest_first[:missing])
    return tuple(one + (i in more) for i, one in enumerate(whole))
