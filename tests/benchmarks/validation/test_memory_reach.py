"""The share of a device that a plan fills is what 95 % of the measured runs allow."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from pathlib import Path

import pytest

from autopar.planner.plan.declared.constraints import DEFAULT_MEMORY
from benchmarks.validation.host_work import published_constants
from benchmarks.validation.outcome import validate_rows
from benchmarks.validation.table import read_table
from tests.cells import cells

ZOO = Path(__file__).parents[3] / "models_zoo"
USUAL = DEFAULT_MEMORY.share or 0.0
RUNS = Path(__file__).with_name("measured_memory.csv")  # every published run that tells its memory


COUNT = 54
BEYOND = COUNT - ceil(0.95 * COUNT)  # runs that need not fit
LARGEST = (12, 41, 52, 53, 54)  # the lines of runs that took most beyond their predictions


@pytest.mark.parametrize("lines", cells([((),), (LARGEST,)], [(LARGEST,)]), ids=len)
def test_the_usual_limit_is_the_largest_that_95_percent_of_measured_runs_fit_in(
    lines: Sequence[int],
) -> None:
    """With `--all-cells` all runs are predicted, else those that take most."""
    rows = [row for row in read_table(RUNS) if not lines or row.line in lines]
    outcomes, skipped = validate_rows(rows, ZOO, published_constants())
    assert not skipped
    # What a run takes of what it was planned to take.
    took = sorted((one.measured_bytes or 0) / one.predicted_bytes for one in outcomes)
    assert len(took) == (len(lines) or COUNT)
    assert floor(100 / took[-1 - BEYOND]) / 100 == USUAL
    assert sum(USUAL * share > 1 for share in took) <= BEYOND
