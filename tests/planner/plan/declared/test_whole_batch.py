"""A batch whose rows meet is split by those alone who say so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.cluster import Cluster
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.declared.constraints import Declared, SplitRule
from autopar.planner.plan.declared.limits import rows_at_once, with_whole_batch
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.search.demands import layout_rules
from autopar.planner.plan.search.search import search
from autopar.planner.trace import trace
from tests.field.cells import MODELS
from tests.planner.plan.plans import model as model_facts
from tests.planner.plan.searches import declared, two_nodes
from tests.planner.subjects import zoo_graph


@pytest.fixture(scope="module")
def pairs() -> Graph:
    return trace(load_model_file(str(MODELS / "pairs.py")))


def test_rows_that_meet_stay_in_one_microbatch_of_one_data_rank(pairs: Graph) -> None:
    found = with_whole_batch(declared(global_batch=8), pairs)
    assert (found.data, found.microbatch, found.shares_rows) == (1, 8, True)
    assert [one.text for one in found.declared[-2:]] == ["dp=1", "microbatch=8"]
    assert "rows of a batch meet" in found.declared[-1].origin


def test_one_data_rank_says_nothing_of_microbatches(pairs: Graph) -> None:
    found = with_whole_batch(declared(global_batch=8, pins__dp=1), pairs)
    assert (found.data, found.microbatch) == (1, 8)
    assert [one.origin for one in found.declared if one.text == "dp=1"] == ["test"]
    assert found.declared[-1].text == "microbatch=8"


@pytest.mark.parametrize("pins", [{"pins__dp": 2}, {"pins__microbatch": 4}])
def test_who_pins_a_part_of_the_batch_gets_it(pairs: Graph, pins: dict[str, int]) -> None:
    constraints = declared(global_batch=8, **pins)
    assert with_whole_batch(constraints, pairs) is constraints


def test_a_pin_of_all_rows_splits_nothing(pairs: Graph) -> None:
    found = with_whole_batch(declared(global_batch=8, pins__dp=1, pins__microbatch=8), pairs)
    assert found.shares_rows
    assert [one.origin for one in found.declared] == ["test"] * 3


def test_rows_that_do_not_meet_are_split_freely() -> None:
    constraints = declared(global_batch=8)
    assert with_whole_batch(constraints, zoo_graph("gpt2.py")) is constraints


def test_a_model_of_one_number_of_rows_is_traced_for_a_batch_that_nobody_splits() -> None:
    assert rows_at_once(declared(global_batch=8, pins__dp=1)) == 8
    assert rows_at_once(declared(global_batch=8, pins__dp=2)) is None
    assert rows_at_once(declared(global_batch=8, pins__microbatch=4)) is None


@cache
def views() -> Graph:
    return trace(load_model_file(str(MODELS / "views.py")))


def views_planned(cluster: Cluster, **places: object) -> tuple[Plan, set[str]]:
    """Return the best plan of a model whose rows meet, and the axes that it splits."""
    graph = views()
    axes = infer_axes(graph)
    constraints = declared(global_batch=64, **places)
    layers, facts = find_layers(graph, axes), model_facts(graph, "views.py")
    plan = search(graph, axes, layers, facts, cluster, constraints)
    named = {axes.names[one.axis] for layer in plan.layouts for one in layer if one.axis}
    return plan, named


def test_tensor_ranks_share_rows_that_meet_wherever_they_are() -> None:
    slow = two_nodes("infiniband-ndr", devices=2)
    plan, split = views_planned(slow)
    assert (plan.arrangement.data, plan.arrangement.microbatches) == (1, 1)
    assert plan.arrangement.tensor == slow.size  # beyond a node, where layers would wait otherwise
    assert "batch" in split


def test_rows_are_not_shared_where_that_is_forbidden() -> None:
    rule = SplitRule(modules="*", axis="batch", is_required=False)
    never = Declared(place="splits 1", field="splits", value=rule, text="never", origin="test")
    graph = views()
    constraints = with_whole_batch(declared(never, global_batch=8), graph)
    assert "batch" in layout_rules(constraints, infer_axes(graph)).forbidden


def test_rows_that_do_not_meet_are_the_business_of_the_data_axis() -> None:
    graph = zoo_graph("gpt2.py")
    constraints = with_whole_batch(declared(global_batch=8), graph)
    assert not constraints.shares_rows
    assert "batch" in layout_rules(constraints, infer_axes(graph)).forbidden


def test_rows_of_one_number_are_shared_for_nobody_sees_whether_they_meet() -> None:
    fixed = replace(zoo_graph("gpt2.py"), fixed_batch=8)
    assert with_whole_batch(declared(global_batch=8), fixed).shares_rows
    assert not with_whole_batch(declared(global_batch=16, pins__dp=2), fixed).shares_rows
