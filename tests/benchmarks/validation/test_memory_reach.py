"""The share of a device that a plan fills is what 95 % of the measured runs allow."""

from __future__ import annotations

from math import ceil, floor
from pathlib import Path

import pytest

from autopar.planner.plan.declared.constraints import DEFAULT_MEMORY
from benchmarks.validation.host_work import published_constants
from benchmarks.validation.outcome import validate_rows
from benchmarks.validation.report import report_of
from benchmarks.validation.table import read_table

ZOO = Path(__file__).parents[3] / "models_zoo"
USUAL = DEFAULT_MEMORY.share or 0.0
RUNS = Path(__file__).with_name("measured_memory.csv")  # every published run that tells its memory


@pytest.mark.slow
def test_the_usual_limit_is_the_largest_that_95_percent_of_measured_runs_fit_in() -> None:
    outcomes, skipped = validate_rows(read_table(RUNS), ZOO, published_constants())
    memory = report_of(outcomes, skipped).total.memory
    assert not skipped
    assert memory is not None
    assert memory.count == 54
    assert floor(100 / memory.reach) / 100 == USUAL
    # What a run takes of a device if it is planned to fill the limit, and is as far off as it was.
    took = [USUAL * (one.measured_bytes or 0) / one.predicted_bytes for one in outcomes]
    assert sum(share <= 1 for share in took) >= ceil(0.95 * len(took))
