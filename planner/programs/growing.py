"""Solves a linear program that gains rows: each time from where the last optimum was.

PuLP hands a program over anew whenever it is solved, so this one is given to HiGHS directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import highspy
import numpy as np
import numpy.typing as npt

Term = tuple[int, float]  # a column and its factor


class GrowingProgram:
    """Columns of zero or more, rows over them, and the first column to make as small as may be.

    State it in units in which the numbers are near one.
    """

    def __init__(self) -> None:
        self._highs = highspy.Highs()
        for name, value in (("output_flag", False), ("threads", 1), ("presolve", "off")):
            self._highs.setOptionValue(name, value)
        self._columns = 0
        self._values: npt.NDArray[np.float64] = np.zeros(0)
        self.least = self.column()
        self._highs.changeColCost(self.least, 1.0)

    def column(self) -> int:
        """Add a column."""
        self._highs.addVar(0.0, inf)
        self._columns += 1
        return self._columns - 1

    def add(self, terms: Iterable[Term], *, most: float, least: float = -inf) -> None:
        """Add a row: least ≤ Σ factor · column ≤ most."""
        pairs = [(column, factor) for column, factor in terms if factor]
        columns = np.array([column for column, _ in pairs], dtype=np.int32)
        factors = np.array([factor for _, factor in pairs], dtype=np.float64)
        self._highs.addRow(least, most, len(pairs), columns, factors)

    def solve(self, *, time_limit_seconds: float) -> float | None:
        """Return the optimum; infinite: nothing satisfies the rows; None: time ran out."""
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + time_limit_seconds)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return inf
        if status != highspy.HighsModelStatus.kOptimal:
            return None
        self._values = np.array(self._highs.getSolution().col_value)
        return float(self._values[self.least])

    def values(self, columns: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return some columns of the last optimum."""
        return self._values[list(columns)]
