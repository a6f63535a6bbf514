"""Linear programs that gain rows."""

from __future__ import annotations

from math import inf
from typing import Any

import highspy
import numpy as np
import pytest

from autopar.planner.programs.growing import GrowingProgram


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


class LostOnce:
    """HiGHS, whose first solve gets lost in rounding."""

    def __init__(self, highs: Any) -> None:
        self.highs, self.solves, self.cleared = highs, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.highs, name)

    def run(self) -> None:
        self.solves += 1
        self.highs.run()

    def getModelStatus(self) -> Any:  # noqa: N802 (a name of HiGHS)
        lost = highspy.HighsModelStatus.kUnknown
        return lost if self.solves == 1 else self.highs.getModelStatus()

    def clearSolver(self) -> None:  # noqa: N802
        self.cleared += 1
        self.highs.clearSolver()


def test_the_other_simplex_begins_anew_where_one_gets_lost() -> None:
    program = GrowingProgram()
    highs = program._highs = LostOnce(program._highs)
    column = program.column()
    program.add([(program.least, 1.0), (column, -1.0)], most=inf, least=0.0)
    program.add([(column, 1.0)], most=inf, least=3.0)
    assert program.solve() == 3.0
    assert (highs.solves, highs.cleared) == (2, 1)


@pytest.mark.parametrize("enough", [1.0, 1.7, 4.0, float("inf")])
def test_a_growing_program_tells_its_optimum_or_a_bound_that_is_enough(enough: float) -> None:
    program = GrowingProgram()
    one, other = program.column(), program.column()
    program.add([(one, 1.0), (other, 1.0)], most=2.0, least=2.0)
    program.add([(one, 1.0), (program.least, -1.0)], most=0.0)
    assert program.solve(enough=enough) == pytest.approx(0.0, abs=1e-9)
    program.add([(other, 1.0), (program.least, -1.0)], most=-1.0)
    optimum = 1.5  # of max(one, 1 + other), if both are 2 together
    told = program.solve(enough=enough)
    assert told is not None
    assert min(enough, optimum) - 1e-9 <= told <= optimum + 1e-9
    program.add([(one, 1.0)], most=1.0)
    optimum = 2.0
    told = program.solve(enough=enough)
    assert told is not None
    assert min(enough, optimum) - 1e-9 <= told <= optimum + 1e-9


def test_what_is_excluded_changes_neither_program_nor_optimum() -> None:
    program = GrowingProgram()
    left, right = program.column(), program.column()
    program.add([(left, 1.0), (right, 1.0)], most=4.0, least=4.0)
    program.add([(left, 2.0), (right, 1.0), (program.least, -1.0)], most=0.0)
    row = program.add([(left, 1.0)], most=4.0, least=0.0)
    assert program.solve() == pytest.approx(4.0)
    assert program.excludes(row, least=2.0, below=5.9)  # 2 · 2 + 2 = 6
    assert not program.excludes(row, least=2.0, below=6.1)
    assert program.excludes(row, least=5.0, below=inf)
    assert program.solve() == pytest.approx(4.0)
    program.limit(row, least=1.0, most=4.0)
    assert program.solve() == pytest.approx(5.0)
    program.change(row, np.array([left]), np.array([0.5]))
    assert program.solve() == pytest.approx(6.0)
