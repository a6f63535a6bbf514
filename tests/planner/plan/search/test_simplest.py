"""The simplest plan within a tolerance of the fastest, against solving every arrangement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.file import choose_cluster, parse_cluster
from autopar.planner.costs.prediction import Zero
from autopar.planner.plan.search.best_first import (
    Complexity,
    FoundLeaf,
    SearchNode,
    best_first,
    simplest_leaf,
)
from autopar.planner.plan.search.points import (
    BestByComplexity,
    complexity,
    complexity_of,
)
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.candidate import Candidate
from autopar.planner.plan.solving.costing import SearchSubject
from tests.cells import cells
from tests.planner.plan.plans import arrangement, parts_of
from tests.planner.plan.searches import declared, planned

ROUNDING = 1 + 1e-9
SLOW = """
[[nodes]]
count = 2
device = "a100-80gb-sxm"
devices = 2
[network]
like = "ethernet-10"
"""
CASES = (
    (("gpt2.py",), choose_cluster(2, "a100-80gb-sxm"), 8, "80%"),
    (("gpt2.py", "size=124m", "layers=4"), choose_cluster(2, "a100-80gb-sxm"), 8, "2.9 GiB"),
    (("gpt2.py", "size=124m", "layers=4"), parse_cluster(SLOW, where="test"), 8, "80%"),
    (("mnist.py", "hidden=4096"), choose_cluster(4, "a10"), 32, "80%"),
)


def explorer(number: int, tolerance: float) -> Explorer:
    model, cluster, batch, memory = CASES[number]
    graph, axes, layers = parts_of(*model)
    constraints = declared(global_batch=batch, limits__memory=memory)
    subject = SearchSubject(graph=graph, axes=axes, layers=layers)
    return Explorer(subject, cluster, replace(constraints, tolerance=tolerance))


@cache
def every(number: int) -> tuple[Candidate, ...]:
    """Solve every arrangement of a case by itself, nothing left out."""
    own = explorer(number, 0.0)
    answers = (
        own.solver.solve(variant).candidate
        for point in own.points
        for variant in own.points.variants(point)
    )
    return tuple(one for one in answers if one is not None)


def seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


EVERY = list(product(range(len(CASES)), (0.005, 0.03, 0.3)))
STAND = [one for one in EVERY[1::2] if one[0] != 2]  # whose arrangements take longest to solve


@pytest.mark.parametrize(("number", "tolerance"), cells(EVERY, STAND))
def test_the_chosen_plan_is_the_simplest_of_all_within_the_tolerance(
    number: int, tolerance: float
) -> None:
    search = explorer(number, tolerance)
    outcome = search.explore()
    chosen = search.choose(outcome, lambda: False).leaf
    least = min(map(seconds, every(number)))
    within = [one for one in every(number) if seconds(one) <= least * (1 + tolerance)]
    best = min(within, key=lambda one: (complexity_of(one), seconds(one)))
    assert seconds(outcome.found[0].leaf) == pytest.approx(least, rel=1e-9)
    assert complexity_of(chosen) == complexity_of(best)
    assert seconds(chosen) == pytest.approx(seconds(best), rel=1e-9)


def test_a_plan_tells_the_fastest_beside_a_simpler_one() -> None:
    cluster = choose_cluster(8, "h100-sxm")
    model = ("gpt2.py", "size=124m")
    fastest = planned(model, cluster, global_batch=64, compile="none")
    simpler = planned(model, cluster, global_batch=64, compile="none", tolerance="5%")
    assert fastest.fastest is None
    assert fastest.arrangement.zero is Zero.GRADIENTS  # it gathers beside the forward
    assert simpler.arrangement.zero is Zero.NONE
    assert simpler.fastest is not None
    assert simpler.fastest.arrangement == fastest.arrangement
    assert simpler.fastest.step_seconds == fastest.prediction.step_seconds
    assert 0 < simpler.slower_by <= 0.05
    assert simpler.proof.gap == 0.0


ASCENDING = (
    arrangement(data=8, shard=8, tensor=1, zero=Zero.NONE),
    arrangement(data=8, shard=8, tensor=1, zero=Zero.PARAMETERS),
    arrangement(data=1, shard=1, tensor=8, zero=Zero.NONE),
    arrangement(data=4, shard=4, tensor=2, zero=Zero.NONE),
    arrangement(data=4, shard=4, tensor=2, zero=Zero.OPTIMIZER),
    arrangement(data=1, shard=1, tensor=2, pipeline=4, zero=Zero.NONE),
    arrangement(data=2, shard=2, tensor=2, pipeline=2, zero=Zero.NONE),
)


def test_arrangements_are_ordered_by_kinds_printed_classes_and_sharding() -> None:
    order = [complexity(one, recomputes=again) for one in ASCENDING for again in (False, True)]
    assert order == sorted(order)
    assert len(set(order)) == len(order)


def test_plans_beyond_the_tolerance_or_surely_less_simple_are_not_solved() -> None:
    leaf = FoundLeaf(value=1.0, rank=(), leaf="fast")
    far = SearchNode(bound=1.1, rank=(), item="slow")
    hard = SearchNode(bound=1.0, rank=(), item="complex")
    asked: list[str] = []

    def expand(item: str) -> list[FoundLeaf[str]]:
        asked.append(item)
        return []

    def simplest(within: float) -> FoundLeaf[str]:
        return simplest_leaf(
            [leaf],
            [far, hard],
            expand,
            of_leaf=lambda _: (1,),
            below=lambda item: (2,) if item == "complex" else (0,),
            within=within,
        )

    assert simplest(1.05) is leaf
    assert not asked
    assert simplest(1.2) is leaf
    assert asked == ["slow"]


def test_what_must_be_beaten_is_the_tolerance_or_what_is_as_simple() -> None:
    simple, usual, complex_ = (1, 0, 0, 0, 0), (2, 1, 0, 0, 0), (3, 2, 0, 0, 0)
    known = BestByComplexity(tolerance=0.03).with_one(usual, 100.0).with_one(usual, 120.0)
    assert known.to_beat(simple) == pytest.approx(103.0)
    assert known.to_beat(usual) == 100.0
    assert known.to_beat(complex_) == 100.0
    assert BestByComplexity(tolerance=0.03).to_beat(simple) == float("inf")


Leaf = tuple[Complexity, float]
leaves = st.tuples(st.tuples(st.integers(0, 3), st.integers(0, 2)), st.integers(10, 30).map(float))
groups = st.lists(st.lists(leaves, min_size=1, max_size=4), min_size=1, max_size=6)


@given(groups, st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_the_simplest_leaf_is_found_whatever_was_left_waiting(
    parents: list[list[Leaf]], tolerance: float
) -> None:
    def node(group: list[Leaf]) -> SearchNode[tuple[Leaf, ...]]:
        bound = min(value for _, value in group) - 3.0
        return SearchNode(bound=bound, rank=(), item=tuple(group))

    def expand(item: tuple[Leaf, ...]) -> list[FoundLeaf[Leaf]]:
        return [FoundLeaf(value=one[1], rank=(), leaf=one) for one in item]

    outcome = best_first(map(node, parents), expand)
    within = outcome.found[0].value * (1 + tolerance)

    def below(item: tuple[Leaf, ...]) -> Complexity:
        return min(one[0] for one in item)

    found = simplest_leaf(
        outcome.found,
        outcome.waiting,
        expand,
        of_leaf=lambda leaf: leaf[0],
        below=below,
        within=within,
    )
    every_leaf = [one for group in parents for one in group if one[1] <= within]
    assert found.leaf == min(every_leaf)
