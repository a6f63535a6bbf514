"""Solves a linear program that gains rows.

PuLP passes a whole program to the solver for every solve. This one is given to HiGHS directly, and
each solve starts from the last optimum. Numbers should be near one, as in `solver`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import highspy
import numpy as np

from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.simulation import Floats

_INTEGER = 1  # highspy.HighsVarType.kInteger
_FEASIBLE = 2  # highspy.SolutionStatus.kSolutionStatusFeasible
_OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "presolve": "off",
    "simplex_iteration_limit": 20_000,
    # The next two take 0.65 and 0.6 of their defaults' time on programs of 700 columns and rows.
    "simplex_dual_edge_weight_strategy": 1,  # devex
    "simplex_scale_strategy": 4,  # by the largest value of a column
    "mip_max_nodes": 500,
    "mip_heuristic_effort": 0.0,
    "mip_max_improving_sols": 1,
    "mip_feasibility_tolerance": 1e-9,
}
_PRIMAL, _DUAL = 4, 1  # values of HiGHS's option simplex_strategy
_PROOFS = highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound

Term = tuple[int, float]  # a column and its factor


class _ProgramRow(NamedTuple):
    """least ≤ Σ factor · column ≤ most."""

    least: float
    most: float
    columns: Numbers
    factors: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNumbers:
    """The result of `solve_whole`; the first column is at least `bound` in every solution."""

    bound: float
    are_found: bool


class GrowingProgram:
    """A program of columns ≥ 0 and rows, with factors near one, that minimises its first column."""

    def __init__(self) -> None:
        self._highs = highspy.Highs()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self._columns = 0
        self._rows: list[_ProgramRow] = []  # not yet given to HiGHS, which adds many as fast as one
        self._values: Floats = np.zeros(0)
        self._whole: list[int] = []  # not yet given to HiGHS
        self.least = self.column()

    def column(self) -> int:
        """Add a column, and return its index."""
        self._columns += 1
        return self._columns - 1

    def add(self, terms: Iterable[Term], *, most: float, least: float = -inf) -> int:
        """Add a row: least ≤ Σ factor · column ≤ most; return its index."""
        pairs = [(column, factor) for column, factor in terms if factor]
        columns, factors = zip(*pairs, strict=True) if pairs else ((), ())
        return self.add_row(np.array(columns), np.array(factors), most=most, least=least)

    def add_row(
        self, columns: Numbers, factors: Floats, *, most: float, least: float = -inf
    ) -> int:
        """Add a row of factors that are not zero; return its index."""
        self._rows.append(_ProgramRow(least, most, columns, factors))
        return int(self._highs.getNumRow()) + len(self._rows) - 1

    def limit(self, row: int, *, least: float, most: float) -> None:
        """Change the limits of a row that the last solve had."""
        self._highs.changeRowBounds(row, least, most)

    def change(self, row: int, columns: Numbers, factors: Floats) -> None:
        """Change factors of a row that the last solve had."""
        for column, factor in zip(columns.tolist(), factors.tolist(), strict=True):
            self._highs.changeCoeff(row, column, factor)

    def whole(self, columns: Iterable[int]) -> None:
        """Restrict columns to whole numbers in `solve_whole`."""
        self._whole += columns

    def solve(self, *, enough: float = inf) -> float | None:
        """Return the optimum, or `enough` once it is proved that the optimum is not below it.

        Infinite if no values satisfy the rows; None at the limit of iterations. The first solve has
        no optimum to start from, so it uses the primal simplex, which is then twice as fast as the
        dual. Later solves start from the last optimum: the dual needs few iterations for new rows.
        If rounding errors stop one of them, the other starts anew.
        """
        self._hand_over()
        self._highs.setOptionValue("objective_bound", enough)
        self._highs.setOptionValue("solve_relaxation", True)
        self._highs.changeColBounds(self.least, 0.0, inf)
        for strategy in (_DUAL, _PRIMAL) if len(self._values) else (_PRIMAL, _DUAL):
            self._highs.setOptionValue("simplex_strategy", strategy)
            self._highs.run()
            status = self._highs.getModelStatus()
            if status != highspy.HighsModelStatus.kUnknown:
                break
            self._highs.clearSolver()
        if status in _PROOFS:
            return inf if status == _PROOFS[0] else enough
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        self._values = np.array(self._highs.getSolution().col_value)
        return float(self._values[self.least])

    def excludes(self, row: int, *, least: float, below: float) -> bool:
        """Whether no solution below a limit has a row of at least `least`.

        It starts from the last optimum, and leaves the program and that optimum as they were.
        """
        basis = self._highs.getBasis()
        _, least_before, most, _ = self._highs.getRow(row)
        self._highs.setOptionValue("objective_bound", below)
        self._highs.setOptionValue("simplex_strategy", _DUAL)
        self._highs.changeRowBounds(row, least, most)
        self._highs.run()
        status = self._highs.getModelStatus()
        is_optimal = status == highspy.HighsModelStatus.kOptimal
        found = self._highs.getInfo().objective_function_value if is_optimal else -inf
        self._highs.changeRowBounds(row, least_before, most)
        self._highs.setBasis(basis)
        return status in _PROOFS or found >= below

    def solve_whole(self, *, below: float) -> WholeNumbers:
        """Look for a solution below a limit in which the columns given to `whole` are whole.

        The search ends with the first solution, or at a limit of nodes.
        """
        self._hand_over()
        self._highs.setOptionValue("objective_bound", inf)
        self._highs.setOptionValue("solve_relaxation", False)
        self._highs.changeColBounds(self.least, 0.0, below)
        self._highs.run()
        if self._highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return WholeNumbers(bound=below, are_found=False)
        info = self._highs.getInfo()
        are_found = info.primal_solution_status == _FEASIBLE
        if are_found:
            self._values = np.array(self._highs.getSolution().col_value)
        return WholeNumbers(bound=max(0.0, min(below, info.mip_dual_bound)), are_found=are_found)

    def values(self, columns: Sequence[int] | Numbers) -> Floats:
        """Return the values of columns in the last solution found."""
        found: Floats = self._values[np.asarray(columns, dtype=np.int64)]
        return found

    def _hand_over(self) -> None:
        """Give HiGHS the new columns and rows."""
        new = self._columns - self._highs.getNumCol()
        if new:
            self._highs.addVars(new, np.zeros(new), np.full(new, inf))
            self._highs.changeColCost(self.least, 1.0)
        if self._whole:
            kinds = np.full(len(self._whole), _INTEGER, dtype=np.uint8)
            self._highs.changeColsIntegrality(len(kinds), np.array(self._whole), kinds)
            self._whole.clear()
        if self._rows:
            least, most, columns, factors = zip(*self._rows, strict=True)
            sizes = [len(one) for one in columns]
            self._highs.addRows(
                len(sizes),
                np.array(least),
                np.array(most),
                sum(sizes),
                np.cumsum([0, *sizes[:-1]], dtype=np.int32),
                np.concatenate(columns).astype(np.int32),
                np.concatenate(factors).astype(np.float64),
            )
            self._rows.clear()
