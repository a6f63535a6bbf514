"""Tests that data ranks with unlike numbers of rows train as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.codegen.proof.comparison import compared
from autopar.codegen.proof.plain import task_of
from autopar.codegen.proof.verification import axes_of
from autopar.codegen.script import lines
from autopar.codegen.script.settings_lines import planned
from autopar.planner.costs.prediction import Zero
from autopar.planner.plan.files.consistency import faults_of
from autopar.planner.plan.plan import Plan
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.padding import Padding, run_padded_script, train_padded_alone
from tests.codegen.plans import pinned_plan
from tests.runtime.processes import run_on_ranks


def uneven_plan(*, zero: Zero = Zero.NONE) -> Plan:
    """A plan of two data ranks: two microbatches of three rows and of one."""
    plan = pinned_plan("gpt2.py", data=2, microbatch=2, zero_levels=(zero,))
    rows = replace(plan.arrangement, rows=(3, 1), microbatch=3, microbatches=2)
    assert rows.global_batch == plan.arrangement.global_batch == 8
    return replace(plan, arrangement=rows)


@pytest.mark.parametrize("zero", cells(Zero, (Zero.NONE, Zero.PARAMETERS)))
def test_uneven_rows_train_as_one_process_does(zero: Zero) -> None:
    found = compare(uneven_plan(zero=zero), steps=3)
    assert found.is_within(1e-10), found


def test_uneven_rows_of_padded_targets_weigh_by_what_counts(tmp_path: Path) -> None:
    """A rank with fewer rows may have more targets that count."""
    plan = uneven_plan(zero=Zero.OPTIMIZER)
    path = write_script(plan, tmp_path)
    arguments = ["--steps", "3", "--dtype", "float64", "--log-every", "1"]
    ranks = run_on_ranks(run_padded_script, 2, str(path), arguments, Padding.ANY)
    task = task_of(plan, plan.model.spec, steps=3)
    (alone,) = run_on_ranks(train_padded_alone, 1, task, Padding.ANY, 1)
    assert compared(ranks, alone, axes_of(plan)).is_within(1e-10)


def test_a_script_says_the_rows_of_each_data_rank() -> None:
    text = lines(planned(uneven_plan()))
    assert "MICROBATCH = (3, 1)  # rows of a microbatch on each data rank" in text
    assert "GLOBAL_BATCH = sum(MICROBATCH) * MICROBATCHES" in text


def test_the_rows_of_many_data_ranks_are_told_in_runs() -> None:
    plan = uneven_plan()
    many = replace(plan.arrangement, data=16, rows=(3,) * 12 + (1,) * 4)
    text = lines(planned(replace(plan, arrangement=many)))
    assert "MICROBATCH = (3,) * 12 + (1,) * 4  # rows of a microbatch on each data rank" in text


@pytest.mark.parametrize("rows", [(3,), (3, 0), (2, 2), (3, 1, 1)])
def test_rows_that_are_not_those_of_the_data_ranks_are_told(rows: tuple[int, ...]) -> None:
    plan = uneven_plan()
    assert not list(faults_of(plan))
    wrong = replace(plan, arrangement=replace(plan.arrangement, rows=rows))
    assert any("arrangement.rows" in fault for fault in faults_of(wrong))
