"""Tests of the one place that calls the solvers."""

import itertools
import random
import time

import pulp
import pytest

from autopar.planner.programs import solver as solver_module
from autopar.planner.programs.solver import (
    NOTHING_SOLVED,
    Infeasible,
    Solved,
    SolverName,
    SolverReport,
    Unfinished,
    is_chosen,
    new_program,
    solve,
)

both = pytest.mark.parametrize("solver", list(SolverName))


def _knapsack(things: int, *, seed: int) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return a program that is easy to state and, with many things, hard to prove."""
    dice = random.Random(seed)
    program = new_program("knapsack")
    takes = [pulp.LpVariable(f"take_{i}", cat="Binary") for i in range(things)]
    program += -pulp.lpSum(dice.randint(500, 600) * take for take in takes)
    for row in range(8):
        weights = [dice.randint(100, 999) for _ in takes]
        load = pulp.lpSum(w * take for w, take in zip(weights, takes, strict=True))
        program += load <= sum(weights) // 2, f"load_{row}"
    return program, takes


@both
def test_the_least_assignment_is_found_with_its_constant(solver: SolverName) -> None:
    program = new_program("three of five")
    takes = [pulp.LpVariable(f"take_{i}", cat="Binary") for i in range(5)]
    program += pulp.lpSum((i + 1) * take for i, take in enumerate(takes)) + 3
    program += pulp.lpSum(takes) >= 2.5, "at_least_three"
    outcome = solve(program, most_nodes=100, solver=solver)
    assert isinstance(outcome, Solved)
    assert outcome.objective == pytest.approx(9.0)  # 1 + 2 + 3, and 3
    assert [is_chosen(take) for take in takes] == [True, True, True, False, False]
    assert (outcome.report.calls, outcome.report.variables, outcome.report.constraints) == (1, 5, 1)


@both
def test_a_contradiction_is_infeasible_not_a_number(solver: SolverName) -> None:
    program = new_program("contradiction")
    take = pulp.LpVariable("take", cat="Binary")
    other = pulp.LpVariable("other", cat="Binary")
    program += take + other
    program += take + other >= 1, "one"
    program += take + other <= 0.5, "none"
    assert isinstance(solve(program, most_nodes=100, solver=solver), Infeasible)


def test_a_large_program_is_solved_to_the_same_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    small = solve(_knapsack(20, seed=2)[0], most_nodes=10_000, solver=SolverName.HIGHS)
    monkeypatch.setattr(solver_module, "_MANY_COLUMNS", 0)
    large = solve(_knapsack(20, seed=2)[0], most_nodes=10_000, solver=SolverName.HIGHS)
    assert isinstance(small, Solved)
    assert isinstance(large, Solved)
    assert large.objective == pytest.approx(small.objective, rel=1e-9)


@both
def test_a_search_that_ends_with_a_solution_is_not_called_optimal(solver: SolverName) -> None:
    program, _ = _knapsack(60, seed=1)
    outcome = solve(program, most_nodes=200, solver=solver)
    assert isinstance(outcome, Unfinished)
    assert outcome.objective is not None
    if solver is SolverName.HIGHS:
        assert outcome.bound is not None
        assert outcome.bound < outcome.objective


@both
def test_a_search_ends_at_the_same_node_with_the_same_result(
    solver: SolverName, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = _knapsack(60, seed=1)
    first = solve(program, most_nodes=200, solver=solver)
    clock = itertools.count(step=1000)  # of a machine that is never idle
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    again = solve(_knapsack(60, seed=1)[0], most_nodes=200, solver=solver)
    assert isinstance(first, Unfinished)
    assert isinstance(again, Unfinished)
    assert (again.objective, again.bound) == (first.objective, first.bound)
    assert again.report.nodes == first.report.nodes
    assert again.report.seconds == 1000.0


def test_a_search_that_ends_before_any_solution_has_a_bound_alone() -> None:
    dice = random.Random(1)
    program = new_program("no easy solution")
    takes = [pulp.LpVariable(f"take_{i}", cat="Binary") for i in range(40)]
    program += pulp.lpSum(takes)
    for row in range(6):
        weights = [dice.randint(100, 999) for _ in takes]
        load = pulp.lpSum(w * take for w, take in zip(weights, takes, strict=True))
        program += load == sum(weights) // 2, f"load_{row}"
    outcome = solve(program, most_nodes=1, solver=SolverName.HIGHS)
    assert isinstance(outcome, Unfinished)
    assert outcome.objective is None


@pytest.mark.parametrize("seed", range(20))
def test_both_solvers_find_the_same_optimum(seed: int) -> None:
    answers = [
        solve(_knapsack(14, seed=seed)[0], most_nodes=10_000, solver=solver)
        for solver in SolverName
    ]
    objectives = [answer.objective for answer in answers if isinstance(answer, Solved)]
    assert len(objectives) == 2
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-9)


def test_two_constraints_of_one_name_are_refused() -> None:
    program = new_program("names")
    take = pulp.LpVariable("take", cat="Binary")
    program += take >= 0, "same"
    with pytest.raises(pulp.PulpError):
        program += take <= 1, "same"


def test_two_variables_of_one_name_are_refused() -> None:
    program = new_program("names")
    program += pulp.LpVariable("same", 0) + pulp.LpVariable("same", 0)
    with pytest.raises(pulp.PulpError):
        solve(program, most_nodes=100)


def test_reports_add_up() -> None:
    one = SolverReport(calls=1, variables=2, constraints=3, seconds=0.5)
    assert one + one + NOTHING_SOLVED == SolverReport(
        calls=2, variables=4, constraints=6, seconds=1.0
    )


def test_a_program_that_changes_between_solves_is_read_anew() -> None:
    program, one = new_program("changing"), pulp.LpVariable("one", cat="Binary")
    program += -one
    program += one <= 1, "limit"

    def optimum() -> float:
        outcome = solve(program, most_nodes=100)
        assert isinstance(outcome, Solved)
        return outcome.objective

    assert optimum() == -1
    del program.constraints["limit"]
    program += one <= 0, "limit"
    assert optimum() == 0
    program.setObjective(-one - pulp.LpVariable("other", upBound=3))
    assert optimum() == -3
