"""A loss that compares the rows of a batch with each other is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.meeting_rows import meeting_rows
from autopar.planner.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.subjects import ZOO_MODELS, zoo_graph

PAIRS = Path(__file__).parents[1] / "field" / "models" / "pairs.py"


def test_the_product_of_all_pairs_of_rows_is_where_they_meet() -> None:
    met = meeting_rows(trace(load_model_file(str(PAIRS), [])))
    assert met is not None
    assert met.target.startswith("aten.m")


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_rows_of_the_zoo_do_not_meet(name: str) -> None:
    assert meeting_rows(zoo_graph(name)) is None
