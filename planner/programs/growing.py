"""Solves a linear program that gains rows: each time from where the last optimum was.

PuLP hands a program over anew whenever it is solved, so this one is given to HiGHS directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import highspy
import numpy as np

from autopar.planner.costs.schedules.actions import Numbers
from autopar.planner.costs.schedules.simulation import Floats

Term = tuple[int, float]  # a column and its factor


class _Row(NamedTuple):
    """least ≤ Σ factor · column ≤ most."""

    least: float
    most: float
    columns: Numbers
    factors: Floats


class GrowingProgram:
    """Columns of zero or more, rows over them, and the first column to make as small as may be.

    State it in units in which the numbers are near one.
    """

    def __init__(self) -> None:
        self._highs = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("presolve", "off")):
            self._highs.setOptionValue(name, value)
        self._columns = 0
        self._rows: list[_Row] = []  # that HiGHS has not yet: it takes many as quickly as one
        self._values: Floats = np.zeros(0)
        self.least = self.column()

    def column(self) -> int:
        """Add a column."""
        self._columns += 1
        return self._columns - 1

    def add(self, terms: Iterable[Term], *, most: float, least: float = -inf) -> None:
        """Add a row: least ≤ Σ factor · column ≤ most."""
        pairs = [(column, factor) for column, factor in terms if factor]
        columns, factors = zip(*pairs, strict=True) if pairs else ((), ())
        self.add_row(np.array(columns), np.array(factors), most=most, least=least)

    def add_row(
        self, columns: Numbers, factors: Floats, *, most: float, least: float = -inf
    ) -> None:
        """Add a row of factors that are not zero."""
        self._rows.append(_Row(least, most, columns, factors))

    def solve(self, *, time_limit_seconds: float) -> float | None:
        """Return the optimum; infinite: nothing satisfies the rows; None: time ran out."""
        self._hand_over()
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + time_limit_seconds)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return inf
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        self._values = np.array(self._highs.getSolution().col_value)
        return float(self._values[self.least])

    def values(self, columns: Sequence[int] | Numbers) -> Floats:
        """Return some columns of the last optimum."""
        found: Floats = self._values[np.asarray(columns, dtype=np.int64)]
        return found

    def _hand_over(self) -> None:
        """Give HiGHS the columns and rows that are new."""
        new = self._columns - self._highs.getNumCol()
        if new:
            self._highs.addVars(new, np.zeros(new), np.full(new, inf))
            self._highs.changeColCost(self.least, 1.0)
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
