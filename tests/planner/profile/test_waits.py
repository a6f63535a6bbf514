"""Collectives that are waited for, as two ranks measure them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.planner.cluster.link import Collective, Manner
from autopar.planner.profile.ranks import run_ranks
from autopar.planner.profile.waits import run_waits


def sleeping(
    manner: Manner, collective: Collective, payload_bytes: int, rank: int, ranks: int
) -> Callable[[], object]:
    """Return what takes as many microseconds as the payload has bytes, on the last rank alone."""
    del manner, collective
    return lambda: time.sleep(payload_bytes / 1e6) if rank == ranks - 1 else None


@pytest.mark.slow
def test_a_call_takes_what_the_slowest_rank_takes_more_with_it_than_without(tmp_path: Path) -> None:
    cases = [("all-reduce", 5_000), ("all-gather", 15_000)]  # far beyond what a machine hesitates
    run_ranks(run_waits, (2, str(tmp_path), sleeping, Manner.WAITED, cases), ranks=2)
    short, long = json.loads((tmp_path / "seconds.json").read_text())
    assert 0.003 < short < 0.010 < long < 0.030  # the computation of a millisecond left out
