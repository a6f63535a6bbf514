"""Linear programs that gain rows."""

from __future__ import annotations

import pytest

from autopar.planner.programs.solver import GrowingProgram


def test_each_row_can_only_raise_the_least() -> None:
    program = GrowingProgram()
    left, right = program.column(), program.column()
    program.add([(left, 1.0), (right, 1.0)], most=4.0, least=4.0)
    program.add([(left, 1.0), (program.least, -1.0)], most=0.0)
    assert program.solve() == pytest.approx(0.0)
    program.add([(right, 3.0), (program.least, -1.0)], most=0.0)
    assert program.solve() == pytest.approx(3.0)
    assert program.values([left, right]) == pytest.approx([3.0, 1.0])


def test_rows_that_contradict_each_other_have_no_optimum() -> None:
    program = GrowingProgram()
    one = program.column()
    program.add([(one, 1.0)], most=-1.0)
    assert program.solve() == float("inf")
