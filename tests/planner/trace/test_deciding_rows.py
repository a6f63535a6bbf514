"""Code that compares the number of rows is traced for one number of rows, with its line."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.declared.limits import check_lone_rows, least_rows
from tests.planner.plan.searches import declared
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.linear(x)
        {line}
            x = x * 2
        return x * mask

def example_batch(batch_size):
    return {{"x": torch.randn(batch_size, 4), "mask": torch.ones(batch_size, 4)}}

def loss(outputs, batch):
    return outputs.square().mean()

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    "line", ["if x.shape[0] > 5:", "if len(x) >= 6:", "if x.size(0) % 2:", "if max(len(x), 9) > 9:"]
)
def test_a_decision_by_the_number_of_rows_fixes_it(tmp_path: Path, line: str) -> None:
    graph = traced(tmp_path, MODEL.format(line=line))
    assert graph.fixed_batch is not None
    file, _, number = graph.fixed_at.rpartition(":")
    assert linecache.getline(file, int(number)).strip() == line


@pytest.mark.parametrize(
    "line",
    [
        "if x.shape[0] > 0:",
        "if x.shape[0] == mask.shape[0]:",
        "if x.shape[1] > 3:",
        "if len(x) > 9000: raise ValueError(len(x))\n        if True:",
    ],
)
def test_a_question_with_one_answer_fixes_nothing(tmp_path: Path, line: str) -> None:
    assert traced(tmp_path, MODEL.format(line=line)).fixed_batch is None


@pytest.mark.parametrize(
    "line", ["if x.shape[0] == 1:", "if len(x) < 2:", "if x.numel() == 4:", "if not len(x) > 1:"]
)
def test_a_decision_whether_there_is_one_row_asks_for_two(tmp_path: Path, line: str) -> None:
    graph = traced(tmp_path, MODEL.format(line=line))
    assert graph.fixed_batch is None
    file, _, number = graph.lone_at.rpartition(":")
    assert linecache.getline(file, int(number)).strip() == line
    assert least_rows(graph, data=2) == 2
    with pytest.raises(InfeasibleError, match="for which the model runs other code"):
        check_lone_rows(declared(global_batch=8, pins__microbatch=1), graph)


@pytest.mark.parametrize(
    "line",
    [
        "if x.shape[0] > 0:",
        "if max(1, len(x)):",
        "if x.shape[0] == 1: raise ValueError(len(x))\n        if True:",
    ],
)
def test_a_model_that_does_alike_with_one_row_takes_it(tmp_path: Path, line: str) -> None:
    graph = traced(tmp_path, MODEL.format(line=line))
    assert (graph.fixed_batch, graph.lone_at) == (None, "")
    assert least_rows(graph, data=1) == 1
