"""The layout program finds what brute force finds, with either solver."""

from __future__ import annotations

import re

import highspy
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autopar.planner.cluster.shape import GroupShape
from autopar.planner.programs.layouts import program as layout_model
from autopar.planner.programs.layouts.building import LayoutInput, frame_of, priced_problem
from autopar.planner.programs.layouts.choice import Budget, LayoutSolution
from autopar.planner.programs.layouts.program import LayoutModel, LayoutVariables, ProgramUnits
from autopar.planner.programs.layouts.rules import FREE, find_slots
from autopar.planner.programs.solver import Matrix, Solved, SolverName, solve
from tests.cells import examples
from tests.planner.programs.brute_force import BruteForce
from tests.planner.programs.layouts.layout_checks import solve_layouts
from tests.planner.programs.layouts.random_pricer import RandomPricer
from tests.planner.programs.layouts.small_graphs import SmallModel, Step, small_model

DEGREE = 2
LARGEST = 1_500  # combinations of strategies that brute force tries
KINDS = ("linear", "biased", "norm", "gelu", "add", "mul", "scaled")

steps = st.builds(
    Step, kind=st.sampled_from(KINDS), first=st.integers(0, 3), second=st.integers(0, 3)
)
models = st.builds(small_model, st.lists(steps, min_size=1, max_size=4), st.integers(1, 2))
many = settings(
    max_examples=examples(200, share=4), derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip


def _pricer(model: SmallModel, *, batch: int, seed: int) -> RandomPricer:
    slots = find_slots(model.graph, model.axes, model.layers)
    return RandomPricer(model.graph, slots, batch=batch, seed=seed)


def _solved(
    model: SmallModel, pricer: RandomPricer, budget: Budget, solver: SolverName = SolverName.HIGHS
) -> tuple[LayoutSolution, ...]:
    return solve_layouts(
        model.graph, model.axes, model.layers, pricer, degree=DEGREE,
        shape=GroupShape(ranks=DEGREE, crossings=()), budget=budget, solver=solver,
    )  # fmt: skip


@many
@given(model=models, batch=st.integers(1, 2), seed=st.integers(0, 10**6))
def test_the_program_finds_what_brute_force_finds(model: SmallModel, batch: int, seed: int) -> None:
    pricer = _pricer(model, batch=batch, seed=seed)
    brute = BruteForce(model, pricer, degree=DEGREE)
    assume(brute.count() <= LARGEST)
    costs = list(brute.all())
    fastest = min(costs)
    smallest = min(size for _, size in costs)
    limit = (fastest[1] + smallest) // 2
    within = min(seconds for seconds, size in costs if size <= limit)
    budget = Budget(bytes=(10.0**9, float(limit)))
    front = _solved(model, pricer, budget)
    assert front[0].seconds == pytest.approx(fastest[0], rel=1e-5)
    fits = [s for s in front if s.saved_bytes + s.weight_bytes <= limit]
    if fits:
        assert fits[0].seconds == pytest.approx(within, rel=1e-5)
    else:  # near-equal points of the front are one
        assert front[0].seconds == pytest.approx(within, rel=0.02)


@settings(max_examples=examples(15), derandomize=True)
@given(model=models, seed=st.integers(0, 10**6))
def test_both_solvers_agree(model: SmallModel, seed: int) -> None:
    pricer = _pricer(model, batch=2, seed=seed)
    highs, cbc = (
        _solved(model, pricer, Budget(points=1), solver)[0]
        for solver in (SolverName.HIGHS, SolverName.CBC)
    )
    assert cbc.seconds == pytest.approx(highs.seconds, rel=1e-5)


@settings(max_examples=examples(20), derandomize=True)
@given(model=models, seed=st.integers(0, 10**6))
def test_the_front_gets_smaller_and_slower(model: SmallModel, seed: int) -> None:
    front = _solved(model, _pricer(model, batch=2, seed=seed), Budget())
    assert 1 <= len(front) <= 4
    seconds = [point.seconds for point in front]
    sizes = [point.saved_bytes + point.weight_bytes for point in front]
    assert seconds == sorted(seconds)
    assert sizes == sorted(sizes, reverse=True)


def test_the_module_lists_its_families_of_constraints() -> None:
    functions = {name for name in vars(layout_model) if name.startswith("_require_")}
    families = (layout_model.__doc__ or "").partition("Families")[2].partition("minimise")[0]
    listed = re.findall(r"^    ([a-z]+(?: [a-z]+)?)  +\S", families, re.M)
    assert {f"_require_{name.replace(' ', '_')}" for name in listed} == functions


@pytest.mark.parametrize("seed", range(10))
def test_a_tensor_with_two_consumers_leaves_the_relaxation_whole(seed: int) -> None:
    kinds = ("norm", "linear", "gelu", "linear", "add")  # the last one adds the block's input
    steps = [Step(kind=kind, first=place, second=0) for place, kind in enumerate(kinds)]
    model = small_model(steps, 2)
    place = LayoutInput(
        graph=model.graph, axes=model.axes, layers=model.layers,
        pricer=_pricer(model, batch=2, seed=seed), degree=DEGREE,
        shape=GroupShape(ranks=DEGREE, crossings=()), rules=FREE,
    )  # fmt: skip
    problem = priced_problem(place, frame_of(place))
    units = ProgramUnits(second_unit=1.0, byte_unit=1.0, saved_factor=1.0, weight_factor=1.0)
    program = LayoutModel(problem, units, LayoutVariables.of(problem)).program(
        second_price=1.0, byte_price=0.0
    )
    assert isinstance(solve(program, most_nodes=100), Solved)
    matrix, relaxed = Matrix.of(program), highspy.Highs()
    matrix.model.col_cost_ = [program.objective.get(one, 0.0) for one in matrix.place]
    relaxed.passModel(matrix.model)
    relaxed.setOptionValue("solve_relaxation", True)
    relaxed.run()
    optimum = relaxed.getInfo().objective_function_value
    assert optimum == pytest.approx(program.objective.value(), rel=1e-9)
