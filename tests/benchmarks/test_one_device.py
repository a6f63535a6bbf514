"""The benchmark for a machine with a GPU runs, as far as it can without one."""

from __future__ import annotations

import pytest
import torch

from benchmarks.one_device import TINY, measured, report


@pytest.mark.slow
def test_script_and_plain_trainings_do_the_same_and_are_told_beside_each_other() -> None:
    row = measured(TINY, rounds=1, seconds=0.1, budget_seconds=1.0)  # compares their losses
    assert all(row.sides.values())
    assert row.by_profile.arrangement == row.by_formulas.arrangement
    assert (row.peak_bytes("script") is None) == (not torch.cuda.is_available())
    lines = [line for line in report([row]) if line.startswith("| tiny")]
    assert len(lines) == (3 if torch.cuda.is_available() else 2)
