"""Solves an integer program through PuLP, and a linear program that gains rows.

The outcome is solved, infeasible, or unfinished at a limit of nodes. Seconds are not limited, so
that a busy machine finds the same. HiGHS is used if it can be imported, else CBC. The outcome is
read from `sol_status`, never from `status`: at a limit PuLP sets the latter to "Optimal", and CBC
leaves plausible numbers in an infeasible program. Both solvers run on one thread, so a program
always has the same answer. The gap is zero unless one is given. The feasibility tolerance is about
1e-9 (HiGHS) and 1e-7 (CBC) in the units of the program, so its numbers should be near one.

PuLP passes the whole program to the solver for every solve. A program that gains rows is therefore
given to HiGHS directly, and each solve starts from the last optimum.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
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
_FEASIBLE = 2  # highspy.SolutionStatus.kSolutionStatusFeasible
_GROWING_OPTIONS = {
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
_NODES_OF_CBC = 100  # assumed for each program
_PRIMAL, _DUAL = 4, 1  # values of HiGHS's option simplex_strategy
_PROOFS = highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound
_HEURISTICS = ("feasibility_jump", "rins", "rens")
_HIGHS_OPTIONS = {
    **{f"{name}_feasibility_tolerance": 1e-9 for name in ("mip", "primal", "dual")},
    # Programs are small and their relaxations close, so presolve, these heuristics and cuts that no
    # longer bind cost time: without heuristics and cuts, a Pareto front of layouts takes 0.6 of it.
    "presolve": "off",
    **{f"mip_heuristic_run_{name}": False for name in _HEURISTICS},
    "mip_lp_age_limit": 2,
}


class SolverError(AutoparError):
    """A solver failed: no solution, no proof of infeasibility, no limit reached."""

    exit_code = ExitCode.NO_PLAN


class SolverName(StrEnum):
    """The solvers that PuLP supports here."""

    HIGHS = "HiGHS"
    CBC = "CBC"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """The solver's statistics: number of programs, their size, nodes, and time."""

    calls: int = 0
    nodes: int = 0  # of the branch and bound; CBC does not report them: 100 are assumed
    variables: int = 0
    constraints: int = 0
    seconds: float = 0.0

    def __add__(self, other: SolverReport) -> SolverReport:
        names = [one.name for one in fields(self)]
        return SolverReport(**{name: getattr(self, name) + getattr(other, name) for name in names})


NOTHING_SOLVED = SolverReport()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The optimum was found and proved, up to the allowed gap; the variables have its values."""

    objective: float
    bound: float  # at most the optimum
    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """It was proved that no assignment satisfies the constraints."""

    report: SolverReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """The limit of nodes was reached; if a solution was found, the variables have its values.

    `objective` is None without a solution, `bound` (of all assignments) if the solver reports none.
    """

    objective: float | None
    bound: float | None
    report: SolverReport


Outcome = Solved | Infeasible | Unfinished


def new_program(name: str) -> pulp.LpProblem:
    """Return an empty program to minimise; PuLP rejects a second constraint of the same name."""
    return pulp.LpProblem(name, pulp.LpMinimize)


@cache
def default_solver() -> SolverName:
    """Return HiGHS if highspy can be imported, else CBC, which is part of PuLP."""
    return SolverName.HIGHS if pulp.HiGHS(msg=False).available() else SolverName.CBC


@cache
def branching_solver() -> SolverName:
    """Return CBC if it runs: it is six times as fast as HiGHS for programs that branch early.

    Measured on stage programs of 1,000 columns with memory rows, whose relaxation is 2 % off: 0.8
    seconds instead of 4 to 5, which HiGHS spends on cuts at the root.
    """
    return SolverName.CBC if pulp.PULP_CBC_CMD(msg=False).available() else default_solver()


def solve(
    program: pulp.LpProblem,
    *,
    most_nodes: int,
    solver: SolverName | None = None,
    gap: float = 0.0,
) -> Outcome:
    """Solve a program to a relative gap, within a limit of nodes."""
    assert program.sense == pulp.LpMinimize, "bounds are read as lower bounds"
    program.checkDuplicateVars()
    name = solver or default_solver()
    began = time.perf_counter()
    try:
        program.solve(_engine(name, most_nodes, gap))
    except (pulp.PulpSolverError, IndexError) as broken:  # HiGHS refused the program
        raise SolverError(
            f"{name} broke down: {broken}", fix="Is the solver installed as PuLP expects it?"
        ) from broken
    report = SolverReport(
        calls=1,
        nodes=_nodes(program, name),
        variables=program.numVariables(),
        constraints=program.numConstraints(),
        seconds=time.perf_counter() - began,
    )
    return _outcome(program, name, report=report, gap=gap)


def is_chosen(variable: pulp.LpVariable) -> bool:
    """Whether a binary variable of a solved program is one, within the solver's tolerance."""
    return bool(variable.varValue > 0.5)


def chosen(variables: Iterable[pulp.LpVariable]) -> list[int]:
    """Return the indices of the binary variables that are one."""
    return [position for position, variable in enumerate(variables) if is_chosen(variable)]


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, given a whole program in one call.

    PuLP would add columns one by one, and HiGHS visits all columns whenever one becomes an integer.
    """

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802, as PuLP calls it
        """Pass on the columns, their types, and the rows."""
        model, columns, rows = lp.solverModel, lp.variables(), list(lp.constraints.values())
        for every in (columns, rows):
            for number, one in enumerate(every):
                one.index = number  # PuLP reads the solution by this index
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

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802
        """Read the solution. PuLP does not know the status of HiGHS at a limit of nodes."""
        if not _is_stopped(lp):
            return super().findSolutionValues(lp)  # type: ignore[no-any-return]
        if lp.solverModel.getInfo().primal_solution_status != _FEASIBLE:
            return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound
        values = lp.solverModel.getSolution().col_value
        for variable in lp.variables():
            variable.varValue = values[variable.index]
        return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible


def _is_stopped(program: pulp.LpProblem) -> bool:
    return bool(program.solverModel.getModelStatus() == highspy.HighsModelStatus.kSolutionLimit)


def _nodes(program: pulp.LpProblem, solver: SolverName) -> int:
    is_known = solver is SolverName.HIGHS
    return max(1, program.solverModel.getInfo().mip_node_count) if is_known else _NODES_OF_CBC


def _engine(solver: SolverName, most_nodes: int, gap: float) -> pulp.LpSolver:
    usual = {"msg": False, "threads": 1, "gapRel": gap, "gapAbs": 0.0}
    if solver is SolverName.HIGHS:
        return _Highs(**usual, mip_max_nodes=most_nodes, **_HIGHS_OPTIONS)
    return pulp.PULP_CBC_CMD(**usual, maxNodes=most_nodes, options=["increment 1e-9"])


def _outcome(
    program: pulp.LpProblem, solver: SolverName, *, report: SolverReport, gap: float
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
            return Unfinished(objective=objective, bound=bound, report=report)
        case pulp.LpSolutionNoSolutionFound if solver is SolverName.CBC or _is_stopped(program):
            return Unfinished(objective=None, bound=_bound(program, solver), report=report)
    raise SolverError(
        f"{solver} says that program {program.name} is {pulp.LpSolution[program.sol_status]}",
        expected="a solution, a proof that there is none, or the limit of nodes",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeNumbers:
    """The result of `solve_whole`; the first column is at least `bound` in every solution."""

    bound: float
    are_found: bool


class GrowingProgram:
    """A program of columns ≥ 0 and rows, with factors near one, that minimises its first column."""

    def __init__(self) -> None:
        self._highs = highspy.Highs()
        for name, value in _GROWING_OPTIONS.items():
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

    def whole(self, columns: Iterable[int]) -> None:
        """Restrict columns to whole numbers in `solve_whole`."""
        self._whole += columns

    def solve(self, *, enough: float = inf) -> float | None:
        """Return the optimum, or `enough` once it is proved that the optimum is not below it.

        Infinite if no values satisfy the rows; None at the limit of iterations. The first solve has
        no optimum to start from, so it uses the primal simplex, which is then twice as fast as the
        dual. Later solves start from the last optimum: the dual needs few iterations for new rows.
        Where one gets lost in rounding, the other begins anew.
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
