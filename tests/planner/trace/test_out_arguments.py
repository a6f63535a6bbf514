"""What an op is told to write to is written by a copy of its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.trace.model_source import buffer_of, ops_of, traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            {line}
        return self.linear(x) * made

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("line", "op"),
    [
        ("made = torch.div(self.kept, 2.0 * self.kept, out=self.kept)", "div"),
        ("made = F.normalize(self.kept, dim=0, out=self.kept)", "div"),
        ("torch.mv(self.linear.weight, self.kept.clone(), out=self.kept); made = self.kept", "mv"),
    ],
)
def test_a_result_is_copied_into_what_it_should_be_written_to(
    tmp_path: Path, line: str, op: str
) -> None:
    graph = traced(tmp_path, MODEL.format(line=line))
    assert buffer_of(graph, "kept").updated
    (made,), (copied,) = ops_of(graph, op), ops_of(graph, "copy_")
    assert copied.writes == ("kept",)
    assert made.outputs[0] in copied.inputs
    (product,) = (one for one in ops_of(graph, "mul") if copied.outputs[0] in one.inputs)
    assert not any("out" in dict(one.arguments) for one in (*graph.ops, product))
