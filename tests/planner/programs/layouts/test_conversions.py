"""What lies in one memory is not converted where that would part it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.layouts import PARTIAL, WHOLE
from autopar.planner.programs.layouts.edges import Conversions
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.wide(x)
        {body}
        return self.out(y)

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("body", "is_converted"),
    [
        ("y = y.view(-1, 2, 4).transpose(1, 2).flatten(1)", True),
        ("y = y.div_(2)", True),  # what comes later reads the result
        ("y = y.view(-1, 2, 4); y = y.relu_().flatten(1)", True),
        ("z = y.view(-1, 2, 4); z.relu_()", False),
        ("y.div_(2); z = y.view(-1, 4, 2); z[:, 1:3].mul_(3)", False),
        ("z = y.view(-1, 2, 4); y.mul_(2); y = z.flatten(1)", False),
        ("y = y.as_strided((x.shape[0], 8), (8, 1)) * 2", False),
    ],
)
def test_memory_with_several_names_is_one_piece(
    tmp_path: Path, body: str, is_converted: bool
) -> None:
    graph = traced(tmp_path, MODEL.format(body=body))
    conversions = Conversions(graph, infer_axes(graph), batch=4)
    (wide,) = (op for op in graph.ops if "wide.weight" in op.inputs)
    assert conversions.allow(wide.outputs[0], WHOLE, WHOLE)
    assert conversions.allow(wide.outputs[0], PARTIAL, WHOLE) is is_converted
