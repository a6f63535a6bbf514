"""A model that squeezes its rows away gets no microbatch of one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.errors import InfeasibleError
from autopar.planner.graph.graph import Graph
from autopar.planner.layers import find_layers
from autopar.planner.plan.declared.limits import check_lone_rows, least_rows
from autopar.planner.plan.search.search import Explorer
from autopar.planner.plan.solving.costing import SearchSubject
from tests.planner.plan.searches import declared
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x).{squeeze}

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("squeeze", "least"),
    [
        ("squeeze()", 2),
        ("squeeze(0)", 2),
        ("squeeze((-1, 0))", 2),
        ("squeeze(-1)", 1),
        ("repeat(2, 1).squeeze()", 1),
    ],
)
def test_the_fewest_rows_are_two_where_one_is_squeezed_away(
    tmp_path: Path, squeeze: str, least: int
) -> None:
    graph = traced(tmp_path, MODEL.format(squeeze=squeeze))
    assert least_rows(graph, data=2) == least


@pytest.mark.parametrize(
    "pins", [{"pins__microbatch": 1}, {"pins__dp": 8}, {"pins__dp": 4, "pins__microbatch": 1}]
)
def test_constraints_that_leave_one_row_are_refused(tmp_path: Path, pins: dict[str, int]) -> None:
    graph = traced(tmp_path, MODEL.format(squeeze="squeeze()"))
    check_lone_rows(declared(global_batch=8), graph)
    with pytest.raises(InfeasibleError, match="one row") as told:
        check_lone_rows(declared(global_batch=8, **pins), graph)
    assert "subject.py" in told.value.where
    assert "squeeze(-1)" in told.value.fix


NORMED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x){more})

def build_model():
    return Model()
"""


def test_a_norm_of_one_number_for_each_row_wants_two_rows_of_all_data_ranks(tmp_path: Path) -> None:
    graph = traced(tmp_path, NORMED.format(more=""))
    assert (least_rows(graph, data=1), least_rows(graph, data=2)) == (2, 1)
    check_lone_rows(declared(global_batch=8, pins__microbatch=1), graph)
    with pytest.raises(InfeasibleError, match="one number for each row"):
        check_lone_rows(declared(global_batch=8, pins__microbatch=1, pins__dp=1), graph)
    wide = traced(tmp_path, NORMED.format(more=".unsqueeze(-1).expand(-1, 4, 2)"))
    assert least_rows(wide, data=1) == 1


def test_a_norm_of_one_number_for_each_row_wants_two_rows_of_a_replica(tmp_path: Path) -> None:
    graph = traced(tmp_path, NORMED.format(more=""))
    local = {"choices__sync_every": 8, "global_batch": 4}
    assert rows_by_replica(graph, **local) == {(1, 2)}
    assert rows_by_replica(graph, pins__shard=2, **local) == {(2, 1)}
    with pytest.raises(InfeasibleError, match="one number for each row") as told:
        check_lone_rows(declared(pins__shard=1, pins__microbatch=1, **local), graph)
    assert "replicas of several data ranks" in told.value.expected
    check_lone_rows(declared(pins__shard=2, pins__microbatch=1, **local), graph)


def rows_by_replica(graph: Graph, **places: Any) -> set[tuple[int, int]]:
    """Return the ranks of a replica and the rows of a microbatch of all arrangements."""
    axes = infer_axes(graph)
    subject = SearchSubject(graph=graph, axes=axes, layers=find_layers(graph, axes))
    explorer = Explorer(subject, choose_cluster(4, "cpu"), declared(**places))
    points = explorer.points
    return {
        (one.averaging_ranks, one.microbatch) for point in points for one in points.variants(point)
    }


@pytest.mark.parametrize(("squeeze", "sizes"), [("squeeze()", {2, 4}), ("squeeze(-1)", {1, 2, 4})])
def test_the_search_gives_no_microbatch_of_one_row(
    tmp_path: Path, squeeze: str, sizes: set[int]
) -> None:
    graph = traced(tmp_path, MODEL.format(squeeze=squeeze))
    axes = infer_axes(graph)
    subject = SearchSubject(graph=graph, axes=axes, layers=find_layers(graph, axes))
    explorer = Explorer(subject, choose_cluster(4, "cpu"), declared(global_batch=4))
    assert {point.microbatch for point in explorer.points} == sizes
