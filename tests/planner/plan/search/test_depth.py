"""Tests that planning grows with the distinct layers of a model, not with its depth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.plan.declared.limits import with_batch
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.costing import SearchSubject
from autopar.planner.programs.solver import SolverReport
from tests.planner.plan.plans import arrangement, parts_of
from tests.planner.plan.searches import declared


def layouts_asked(layers: int) -> tuple[int, SolverReport]:
    """Return the classes of layers of a GPT-2 so deep, and what its layouts asked the solver."""
    graph, axes, found = parts_of("gpt2.py", "size=124m", f"layers={layers}")
    cluster = choose_cluster(8, "a100-80gb-sxm")
    constraints = with_batch(declared(global_batch=64), cluster, graph)
    explorer = Explorer(SearchSubject(graph=graph, axes=axes, layers=found), cluster, constraints)
    for tensor in (2, 4):  # one rank splits nothing
        explorer.costing.solutions(arrangement(tensor=tensor, microbatch=2))
    return len(found.classes), replace(explorer.costing.layout_report(), seconds=0.0)


@pytest.fixture(scope="module")
def shallow() -> tuple[int, SolverReport]:
    return layouts_asked(12)


@pytest.fixture(scope="module")
def deep() -> tuple[int, SolverReport]:
    return layouts_asked(48)


def test_equal_layers_are_one_class_however_many(
    shallow: tuple[int, SolverReport], deep: tuple[int, SolverReport]
) -> None:
    assert shallow[0] == deep[0]


def test_layouts_of_48_layers_ask_no_more_of_the_solver_than_those_of_12(
    shallow: tuple[int, SolverReport], deep: tuple[int, SolverReport]
) -> None:
    # a front may have a point more or less, and degrees have programs of different size
    assert deep[1].calls <= shallow[1].calls + 3
    assert deep[1].variables / deep[1].calls <= 1.1 * shallow[1].variables / shallow[1].calls
    assert deep[1].constraints / deep[1].calls <= 1.1 * shallow[1].constraints / shallow[1].calls
