"""Turns predicted and measured figures into errors and rank correlation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, sqrt
from statistics import fmean, median


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How far predictions are off, as fractions of what was measured."""

    count: int
    median: float
    ninetieth: float
    mean: float
    bias: float  # median of the signed error: below zero is too low
    reach: float  # 95 % of what was measured is at most this times what was predicted


def score(predicted: Sequence[float], measured: Sequence[float]) -> Score:
    """Return the errors of predictions, each relative to what was measured."""
    signed = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    errors = sorted(map(abs, signed))
    return Score(
        count=len(errors),
        median=median(errors),
        ninetieth=errors[ceil(0.9 * len(errors)) - 1],
        mean=fmean(errors),
        bias=median(signed),
        reach=sorted(m / p for p, m in zip(predicted, measured, strict=True))[
            ceil(0.95 * len(errors)) - 1
        ],
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's τ-b of two orders.

        τ = (concordant − discordant) ÷ √((n₀ − ties of the first) · (n₀ − ties of the second))

    n₀ = n·(n − 1) ÷ 2 pairs. If all figures of one order are equal, τ is 0.
    """
    agreement = untied_first = untied_second = 0
    for one, other in combinations(range(len(first)), 2):
        a = _sign(first[one] - first[other])
        b = _sign(second[one] - second[other])
        agreement += a * b
        untied_first += a != 0
        untied_second += b != 0
    scale = sqrt(untied_first * untied_second)
    return agreement / scale if scale else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
