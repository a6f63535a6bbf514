"""A batch whose rows meet is split by those alone who say so."""

from __future__ import annotations

import pytest

from autopar.planner.graph import Graph
from autopar.planner.model_file import load_model_file
from autopar.planner.plan.whole_batch import rows_at_once, with_whole_batch
from autopar.planner.trace import trace
from tests.field.cells import MODELS
from tests.planner.plan.searches import declared
from tests.planner.subjects import zoo_graph


@pytest.fixture(scope="module")
def pairs() -> Graph:
    return trace(load_model_file(str(MODELS / "pairs.py")))


def test_rows_that_meet_stay_in_one_microbatch_of_one_data_rank(pairs: Graph) -> None:
    found = with_whole_batch(declared(global_batch=8), pairs)
    assert (found.data, found.microbatch) == (1, 8)
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


def test_rows_that_do_not_meet_are_split_freely() -> None:
    constraints = declared(global_batch=8)
    assert with_whole_batch(constraints, zoo_graph("gpt2.py")) is constraints


def test_a_model_of_one_number_of_rows_is_traced_for_a_batch_that_nobody_splits() -> None:
    assert rows_at_once(declared(global_batch=8, pins__dp=1)) == 8
    assert rows_at_once(declared(global_batch=8, pins__dp=2)) is None
    assert rows_at_once(declared(global_batch=8, pins__microbatch=4)) is None
