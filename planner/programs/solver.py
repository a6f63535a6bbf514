"""Solves an integer program through PuLP.

The outcome is solved, infeasible, or unfinished at a limit of nodes. Seconds are not limited, so
that a busy machine finds the same. HiGHS is used if it can be imported, else CBC. The outcome is
read from `sol_status`, never from `status`: at a limit PuLP sets the latter to "Optimal", and CBC
leaves plausible numbers in an infeasible program. Both solvers run on one thread, so a program
always has the same answer. The gap is zero unless one is given. The feasibility tolerance is about
1e-9 (HiGHS) and 1e-7 (CBC) in the units of the program, so its numbers should be near one.

HiGHS gets the columns and rows of a program in one call. They are read once for all solves of
programs that differ in their prices alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from itertools import accumulate
from math import inf

import highspy
import numpy as np
import pulp

from autopar.planner.errors import AutoparError, ExitCode

_KINDS = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
_OPTIMAL = highspy.HighsModelStatus.kOptimal
_INFEASIBLE = highspy.HighsModelStatus.kInfeasible
_STOPPED = highspy.HighsModelStatus.kSolutionLimit  # at the limit of nodes
_FEASIBLE = 2  # highspy.SolutionStatus.kSolutionStatusFeasible
_NODES_OF_CBC = 100  # assumed for each program
_TOLERANCE = 1e-9
_HEURISTICS = ("feasibility_jump", "rins", "rens")
_HIGHS_OPTIONS = {
    **{f"{name}_feasibility_tolerance": _TOLERANCE for name in ("mip", "primal", "dual")},
    # Programs are small and their relaxations close, so presolve, these heuristics and cuts that no
    # longer bind cost time: without them, a Pareto front of layouts takes 0.6 of the time.
    "presolve": "off",
    **{f"mip_heuristic_run_{name}": False for name in _HEURISTICS},
    "mip_lp_age_limit": 2,
}
# Presolve is worth its time for programs of more columns, such as those of models with an unrolled
# loop over 64 positions: 1.3 and 3.5 s instead of 2.5 and 5.9.
_MANY_COLUMNS = 20_000


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

    `objective` is None if no solution was found, `bound` (at most the optimum) if the solver does
    not report one.
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
    name = solver or default_solver()
    if name is SolverName.CBC:
        program.checkDuplicateVars()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The columns and rows of a program, as HiGHS takes them in one call."""

    place: Mapping[pulp.LpVariable, int]  # of each column
    rows: Sequence[pulp.LpConstraint]
    whole: Sequence[int]  # the columns that take whole numbers
    model: highspy.HighsLp  # without costs

    @classmethod
    def of(cls, program: pulp.LpProblem) -> Matrix:
        """Return the matrix of a program; it is built anew only if rows or columns have changed."""
        known: Matrix | None = getattr(program, "matrix", None)
        if known is None or not known._is_of(program):
            program.checkDuplicateVars()
            known = cls._read(program.variables(), [*program.constraints.values()])
            program.matrix = known
        return known

    def _is_of(self, program: pulp.LpProblem) -> bool:
        rows = program.constraints.values()
        return (
            len(rows) == len(self.rows)
            and all(row is own for row, own in zip(rows, self.rows, strict=True))
            and all(one in self.place for one in program.objective)
        )

    @classmethod
    def _read(cls, columns: Sequence[pulp.LpVariable], rows: Sequence[pulp.LpConstraint]) -> Matrix:
        place = {one: number for number, one in enumerate(columns)}
        entries = [[(place[v], factor) for v, factor in row.items() if factor] for row in rows]
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(columns), len(rows)
        model.col_lower_ = [-inf if one.lowBound is None else one.lowBound for one in columns]
        model.col_upper_ = [inf if one.upBound is None else one.upBound for one in columns]
        kinds = [one.cat == pulp.LpInteger for one in columns]
        model.integrality_ = [_KINDS[is_whole] for is_whole in kinds]
        model.row_lower_ = [-inf if row.getLb() is None else row.getLb() for row in rows]
        model.row_upper_ = [inf if row.getUb() is None else row.getUb() for row in rows]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = [0, *accumulate(map(len, entries))]
        model.a_matrix_.index_ = [column for row in entries for column, _ in row]
        model.a_matrix_.value_ = [factor for row in entries for _, factor in row]
        whole = [number for number, is_whole in enumerate(kinds) if is_whole]
        return cls(place=place, rows=rows, whole=whole, model=model)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, given a whole program in one call, and asked for no more than the solution.

    PuLP would add columns one by one, and HiGHS visits all columns whenever one becomes an integer.
    """

    def actualSolve(self, lp: pulp.LpProblem) -> int:  # noqa: N802, as PuLP calls it
        """Solve a program, and leave its solution in its variables.

        If the relaxed program has an optimum of whole numbers, it is the program's. If no values
        satisfy it, none satisfy the program.
        """
        self.createAndConfigureSolver(lp)
        matrix, highs = Matrix.of(lp), lp.solverModel
        matrix.model.col_cost_ = [lp.objective.get(one, 0.0) for one in matrix.place]
        highs.passModel(matrix.model)
        if len(matrix.place) > _MANY_COLUMNS:
            highs.setOptionValue("presolve", "on")
        highs.setOptionValue("solve_relaxation", True)
        highs.run()
        values = np.array(highs.getSolution().col_value)[matrix.whole]
        is_whole = np.abs(values - np.round(values)).max(initial=0.0) <= _TOLERANCE
        status = highs.getModelStatus()
        if status != _INFEASIBLE and not (status == _OPTIMAL and is_whole):
            highs.clearSolver()
            highs.setOptionValue("solve_relaxation", False)
            highs.run()
        lp_status, solution = self._found(highs)
        lp.assignStatus(lp_status, solution)
        if solution in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = highs.getSolution().col_value
            for variable, value in zip(matrix.place, values, strict=True):
                variable.varValue = value
        return lp_status

    @staticmethod
    def _found(highs: highspy.Highs) -> tuple[int, int]:
        """Return PuLP's status of the program and of the solution."""
        status, info = highs.getModelStatus(), highs.getInfo()
        if status == _OPTIMAL:
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
        if status == _INFEASIBLE:
            return pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible
        if status == _STOPPED and info.primal_solution_status == _FEASIBLE:
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def _is_stopped(program: pulp.LpProblem) -> bool:
    return bool(program.solverModel.getModelStatus() == _STOPPED)


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
