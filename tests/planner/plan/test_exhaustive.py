"""Tests that the search loses nothing: against solving every arrangement that is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf

import pytest

from autopar.planner.cluster.choose import choose_cluster
from autopar.planner.costs.prediction import Arrangement
from autopar.planner.plan.costing import Subject
from autopar.planner.plan.search import Explorer, with_batch
from tests.planner.plan.plans import parts_of
from tests.planner.plan.searches import declared

ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on some devices, with little memory or much."""

    model: tuple[str, ...]
    gpus: int
    batch: int
    memory: str

    def __str__(self) -> str:
        return f"{' '.join(self.model)} on {self.gpus} with {self.memory}"


CASES = (
    Case(model=("gpt2.py",), gpus=2, batch=8, memory="80%"),
    Case(model=("gpt2.py",), gpus=8, batch=8, memory="80%"),
    Case(model=("gpt2.py", "size=124m"), gpus=2, batch=8, memory="5.25 GiB"),
    Case(model=("gpt2.py", "size=124m"), gpus=4, batch=32, memory="5.5 GiB"),
    Case(model=("gpt2.py", "size=124m"), gpus=8, batch=16, memory="80%"),
    Case(model=("t5.py",), gpus=2, batch=8, memory="80%"),
    Case(model=("resnet.py",), gpus=4, batch=16, memory="80%"),
)


def explorer(case: Case) -> Explorer:
    """The search of a case, not begun."""
    graph, axes, layers = parts_of(*case.model)
    cluster = choose_cluster(case.gpus, "a100-80gb-sxm")
    constraints = declared(global_batch=case.batch, limits__memory=case.memory)
    subject = Subject(graph=graph, axes=axes, layers=layers)
    return Explorer(subject, cluster, with_batch(constraints, cluster, graph))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What one arrangement comes to, infinite where none fits, and what was said before."""

    arrangement: Arrangement
    of_point: float
    without_memory: float
    of_variant: float
    value: float


@cache
def solved(case: Case) -> tuple[Solved, ...]:
    """Solve every arrangement that is allowed, nothing left out."""
    return tuple(_solved(explorer(case)))


def _solved(every: Explorer) -> Iterator[Solved]:
    for point in every.points():
        for variant in every.allowed_variants(point):
            found = every.judge.solve(variant).candidate
            yield Solved(
                arrangement=variant,
                of_point=every.bounds.of_point(point),
                without_memory=every.bounds.without_memory(variant),
                of_variant=every.bounds.of_variant(variant),
                value=found.prediction.step_seconds if found else inf,
            )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_bound_exceeds_what_an_arrangement_comes_to(case: Case) -> None:
    for one in solved(case):
        assert one.of_point <= one.value * ROUNDING, one
        assert one.without_memory <= one.value * ROUNDING, one
        assert one.of_variant <= one.value * ROUNDING, one


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_search_finds_what_solving_everything_finds(case: Case) -> None:
    outcome = explorer(case).explore()
    assert outcome.is_complete
    assert outcome.found[0].value == min(one.value for one in solved(case))
    assert outcome.gap == 0.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_has_something_to_choose(case: Case) -> None:
    values = {one.value for one in solved(case)}
    assert len(values) > 10
    assert min(values) < inf
