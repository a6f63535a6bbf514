"""Ranks that are slower than the others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from autopar.runtime.checkpointing.progress import Pace, RankTimes, slow_among
from autopar.runtime.ranks.mesh import start
from tests.runtime.processes import run_on_ranks


def own(product: float = 1.0, reading: float = 0.0) -> RankTimes:
    return RankTimes(product_seconds=product, reading_seconds=reading)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (own(1.09), []),
        (own(1.11), ["the same product"]),
        (own(0.5), []),
        (own(1.0, 0.9), []),  # a tenth of the step of 10 s is 1 s
        (own(1.0, 1.1), ["reading the rows of a step"]),
    ],
)
def test_a_rank_is_slow_by_a_tenth(last: RankTimes, told: list[str]) -> None:
    ranks = [own(), own(), own(), last]
    found = list(slow_among(ranks, ["cpu"] * 4, 10.0, ranks_of_stage=2))
    assert [one.what for one in found] == told
    assert {(one.rank, one.pipeline_rank) for one in found} <= {(3, 1)}


def test_unlike_devices_are_not_compared() -> None:
    ranks = [own(), own(), own(5.0), own(5.0)]
    assert list(slow_among(ranks, ["a", "a", "b", "b"], 10.0, ranks_of_stage=4)) == []


def rows_read_in(seconds: float) -> Iterator[int]:
    for row in range(6):
        time.sleep(seconds)
        yield row


def slow_on_rank_1() -> list[str]:
    """Read slowly on one of two ranks, and return who is told to be slow."""
    mesh = start(pipeline=1, data=2, tensor=1)
    compared, found = Pace(mesh), list[str]()
    for _ in mesh.reading.timed(rows_read_in(0.05 * mesh.rank)):
        found += map(str, compared.slow_ranks(1, 0.1))
        compared._lines = 0
    return [one for one in found if "reading" in one]


def test_a_rank_that_waits_for_its_rows_is_told_on_all_ranks() -> None:
    first, second = run_on_ranks(slow_on_rank_1, 2)
    assert first == second
    assert len(first) >= 3
    assert first[0].startswith("rank 1 (pipeline rank 0) is slow: reading the rows of a step takes")
