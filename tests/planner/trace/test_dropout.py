"""A dropout that drops nothing hands on what it got, and so does its name in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.trace.model_source import ops_of, traced

MODEL = """
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear({dropout})

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x):
        x = self.first(x)
        return x + self.inner(x)

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("dropout", "is_op"),
    [
        ("F.dropout(x, 0.0)", False),
        ("F.dropout(x, 0.5, training=False)", False),
        ("F.dropout(x, 0.5)", True),
    ],
)
def test_code_around_a_dropout_of_nothing_reads_what_that_got(
    dropout: str, is_op: bool, tmp_path: Path
) -> None:
    graph = traced(tmp_path, MODEL.format(dropout=dropout))
    (add,) = ops_of(graph, "add")
    first = graph.ops[0]
    assert add.inputs[0] == first.outputs[0]
    assert bool(ops_of(graph, "dropout")) == is_op
