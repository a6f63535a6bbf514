"""Parts of the benchmark are chosen by name."""

from __future__ import annotations

from functools import partial

from benchmarks.on_gpu.__main__ import PARTS, chosen


def test_single_checks_are_one_part_and_run_in_their_own_order() -> None:
    found = chosen(["syncs", "steps", "faults"])
    assert list(found) == ["ranks", "steps"]
    assert found["steps"] is PARTS["steps"]
    rows = found["ranks"].rows
    assert isinstance(rows, partial)
    assert rows.keywords["names"] == ("faults", "syncs")
