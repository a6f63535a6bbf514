"""A collate function that mixes rows is told: it gets the rows of a microbatch of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.dataset_notes import check_dataset
from autopar.planner.axes.infer import infer_axes
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.trace.model_source import linear_model, written

COLLATING = """
from torch.utils.data import default_collate

def build_dataset():
    return [{{"x": torch.randn(4)}} for _ in range(20)]

def collated(rows):
    batch = default_collate(rows)
    x = batch["x"]
    return {{"x": {x}}}

def build_collate():
    return collated
"""


@pytest.mark.parametrize(
    ("x", "is_told"),
    [
        ("x - x.mean(0)", True),
        ("0.7 * x + 0.3 * x.flip(0)", True),
        ("x / x.norm()", True),
        ("x - x.mean(1, keepdim=True)", False),
        ("x + 0.1 * torch.randn_like(x)", False),
    ],
)
def test_rows_that_a_collate_function_mixes_are_told(
    tmp_path: Path, x: str, *, is_told: bool
) -> None:
    source = linear_model("return self.linear(x)") + COLLATING.format(x=x)
    file = load_model_file(str(written(tmp_path, source)))
    graph, told = trace(file), list[str]()
    check_dataset(file, graph, infer_axes(graph), told.append)
    assert any("another 'x' beside other rows" in one for one in told) is is_told
