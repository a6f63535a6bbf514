"""Solves an integer program through PuLP, and a linear program that gains rows.

Solves an integer program through PuLP and says what came of it: solved, infeasible, timed out.

HiGHS solves where it can be imported, CBC otherwise. The verdict is read from `sol_status`, never
from `status`: on a time-out PuLP calls the latter "Optimal", and CBC leaves plausible numbers in an
infeasible program. Both solvers run on one thread and to a gap of zero, so that a program has one
answer; what remains is their tolerance of feasibility, about 1e-9 (HiGHS) and 1e-7 (CBC) in the
units of the program: state it in units in which the numbers are near one.

Solves a linear program that gains rows: each time from where the last optimum was.

PuLP hands a program over anew whenever it is solved, so this one is given to HiGHS directly.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

import highspy
import numpy as np
import pulp

from autopar.planner.costs.schedules.orders import Numbers
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.errors import AutoparError, ExitCode

_INTEGER = 1  # highspy.HighsVarType.kInteger
_TOLERANCE = 1e-9
_HIGHS_OPTIONS = {
    "mip_feasibility_tolerance": _TOLERANCE,
    "primal_feasibility_tolerance": _TOLERANCE,
    "dual_feasibility_tolerance": _TOLERANCE,
    # Programs are small and their relaxations close: preparing takes longer than it saves.
    "presolve": "off",
    "mip_heuristic_run_feasibility_jump": False,
}


class SolverError(AutoparError):
    """A solver broke down: neither a solution, nor a proof that there is none, nor a time-out."""

    exit_code = ExitCode.NO_PLAN


class SolverName(StrEnum):
    """The solvers that PuLP drives for us."""

    HIGHS = "HiGHS"
    CBC = "CBC"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """What was asked of the solvers: how often, how much in all, how long it took."""

    calls: int = 0
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0

    def __add__(self, other: SolverReport) -> SolverReport:
        return SolverReport(
            calls=self.calls + other.calls,
            variables=self.variables + other.variables,
            constraints=self.constraints + other.constraints,
            seconds=self.seconds + other.seconds,
        )


NOTHING_SOLVED = SolverReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The optimum was found and proved, up to the gap that was allowed; the variables hold it."""

    objective: float
    bound: float  # no more than the optimum
    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """It was proved that no assignment satisfies the constraints."""

    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The time limit came first; with an objective, the variables hold the best that was found.

    The bound is what no assignment can beat, as far as the solver tells (CBC does not, here).
    """

    objective: float | None
    bound: float | None
    report: SolverReport


Outcome = Solved | Infeasible | TimedOut


def new_program(name: str) -> pulp.LpProblem:
    """Return an empty program to minimise; PuLP refuses a second constraint of the same name."""
    return pulp.LpProblem(name, pulp.LpMinimize)


@cache
def default_solver() -> SolverName:
    """Return HiGHS where highspy can be imported, else CBC, which PuLP brings along."""
    return SolverName.HIGHS if pulp.HiGHS(msg=False).available() else SolverName.CBC


@cache
def branching_solver() -> SolverName:
    """Return CBC, where it runs: six times as fast as HiGHS where a program must branch early.

    Measured on stage programs of 1,000 columns with memory rows, whose relaxation is 2 % off: 0.8
    seconds against 4 to 5. HiGHS spends them on cuts at the root.
    """
    return SolverName.CBC if pulp.PULP_CBC_CMD(msg=False).available() else default_solver()


def solve(
    program: pulp.LpProblem,
    *,
    time_limit_seconds: float,
    solver: SolverName | None = None,
    gap: float = 0.0,
) -> Outcome:
    """Solve a program to a gap, as a share of the objective, within the time limit."""
    assert program.sense == pulp.LpMinimize, "bounds are read as lower bounds"
    program.checkDuplicateVars()
    name = solver or default_solver()
    began = time.perf_counter()
    try:
        program.solve(_engine(name, time_limit_seconds, gap))
    except (pulp.PulpSolverError, IndexError) as broken:  # PuLP reads what HiGHS refused to load
        raise SolverError(
            f"{name} broke down: {broken}", fix="Is the solver installed as PuLP expects it?"
        ) from broken
    report = SolverReport(
        calls=1,
        variables=program.numVariables(),
        constraints=program.numConstraints(),
        seconds=time.perf_counter() - began,
    )
    return _outcome(program, name, report=report, limit_seconds=time_limit_seconds, gap=gap)


def is_chosen(variable: pulp.LpVariable) -> bool:
    """Return whether a binary variable of a solved program is one, up to the solver's tolerance."""
    return bool(variable.varValue > 0.5)


def chosen(variables: Iterable[pulp.LpVariable]) -> list[int]:
    """Return the positions of the binary variables that are one."""
    return [position for position, variable in enumerate(variables) if is_chosen(variable)]


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, given a program at once.

    PuLP gives it column by column, and HiGHS goes over all columns whenever one becomes integer.
    """

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802, as PuLP calls it
        """Hand over the columns, which of them are integer, and the rows."""
        model, columns, rows = lp.solverModel, lp.variables(), list(lp.constraints.values())
        for every in (columns, rows):
            for number, one in enumerate(every):
                one.index = number  # by which PuLP reads the solution
        costs = [lp.objective.get(one, 0.0) for one in columns]
        lower = [-inf if one.lowBound is None else one.lowBound for one in columns]
        upper = [inf if one.upBound is None else one.upBound for one in columns]
        model.addCols(len(columns), costs, lower, upper, 0, [], [], [])
        integer = [one.index for one in columns if one.cat == pulp.LpInteger]
        model.changeColsIntegrality(len(integer), integer, [_INTEGER] * len(integer))
        entries = [[(v.index, c) for v, c in row.items() if c != 0] for row in rows]
        starts = [0, *accumulate(map(len, entries))]
        model.addRows(
            len(rows),
            [-inf if row.getLb() is None else row.getLb() for row in rows],
            [inf if row.getUb() is None else row.getUb() for row in rows],
            starts[-1],
            starts[:-1],
            [index for row in entries for index, _ in row],
            [value for row in entries for _, value in row],
        )


def _engine(solver: SolverName, time_limit_seconds: float, gap: float) -> pulp.LpSolver:
    limits = {"msg": False, "timeLimit": time_limit_seconds, "threads": 1}
    if solver is SolverName.HIGHS:
        return _Highs(gapRel=gap, gapAbs=0.0, **limits, **_HIGHS_OPTIONS)
    return pulp.PULP_CBC_CMD(gapRel=gap, gapAbs=0.0, options=["increment 1e-9"], **limits)


def _outcome(
    program: pulp.LpProblem,
    solver: SolverName,
    *,
    report: SolverReport,
    limit_seconds: float,
    gap: float,
) -> Outcome:
    match program.sol_status:
        case pulp.LpSolutionOptimal:
            objective = _objective(program)
            return Solved(
                objective=objective, bound=objective - gap * abs(objective), report=report
            )
        case pulp.LpSolutionInfeasible:
            return Infeasible(report=report)
        case pulp.LpSolutionIntegerFeasible:
            objective, bound = _objective(program), _bound(program, solver)
            return TimedOut(objective=objective, bound=bound, report=report)
        case pulp.LpSolutionNoSolutionFound if (
            report.seconds >= 0.9 * limit_seconds or solver is SolverName.CBC  # it gives up early
        ):
            return TimedOut(objective=None, bound=_bound(program, solver), report=report)
    raise SolverError(
        f"{solver} says that program {program.name} is {pulp.LpSolution[program.sol_status]}",
        expected="a solution, a proof that there is none, or the end of the time limit",
    )


def _objective(program: pulp.LpProblem) -> float:
    """Return the objective with its constant, which PuLP does not pass on to HiGHS."""
    return float(pulp.value(program.objective))


def _bound(program: pulp.LpProblem, solver: SolverName) -> float | None:
    if solver is not SolverName.HIGHS:
        return None
    bound = float(program.solverModel.getInfo().mip_dual_bound)
    return bound + float(program.objective.constant) if abs(bound) < 1e30 else None


Term = tuple[int, float]  # a column and its factor


class _ProgramRow(NamedTuple):
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
        self._rows: list[
            _ProgramRow
        ] = []  # that HiGHS has not yet: it takes many as quickly as one
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
        self._rows.append(_ProgramRow(least, most, columns, factors))

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
