"""Layers that write across their borders are found, and refused where a copy would differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from autopar.planner.findings.writes import writing_calls
from tests.planner.trace.model_source import traced

MODEL = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y=None):
        {layer}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = Layer()

    def forward(self, x):
        x = self.first(x)
        {model}

def build_model():
    return Model()
"""
PLAIN = "return self.layer(x)"
RETURNED = "z = self.layer(x); z += x; return z"


@pytest.mark.parametrize(
    ("layer", "model", "is_found"),
    [
        ("return self.linear(x.relu_())", PLAIN, True),
        ("x += self.linear(x); return x", "return self.layer(x) * 2", True),
        ("x[:, 0] = 0; return self.linear(x)", PLAIN, True),
        ("return self.linear(x).view(-1, 2, 2).flatten(1)", RETURNED, True),
        ("return self.linear(x).relu_()", PLAIN, False),
        ("return self.linear(x)", RETURNED, False),
        ("return self.linear(x)", "z = self.layer(x[:, None]); z += 1; return z", True),
        ("return self.linear(x).exp()", "z = self.layer(x[:, None]); z += 1; return z", False),
        ("return self.linear(x).view(-1, 2, 2)", "return self.layer(x) * 2", False),
    ],
)
def test_writes_across_a_border_are_found(
    layer: str, model: str, is_found: bool, tmp_path: Path
) -> None:
    graph = traced(tmp_path, MODEL.format(layer=layer, model=model))
    assert writing_calls(graph, ["layer"]) == ({"layer"} if is_found else set())


@pytest.mark.parametrize(
    ("layer", "model", "words"),
    [
        ("return self.linear(x.relu_())", "return self.layer(x) + x", "reads that afterwards"),
        ("x[:, 0] = 0; return self.linear(x)", "return self.layer(x) + x", "reads that afterwards"),
        ("return self.linear(x.relu_()) + y", "return self.layer(x, x[:, :1])", "reads that after"),
        (
            "z = self.linear(x); return z, z.view(-1, 2, 2)",
            "y, z = self.layer(x); z += 1; return y",
            "returns views of one tensor",
        ),
    ],
)
def test_what_a_copy_would_hide_is_refused(
    layer: str, model: str, words: str, tmp_path: Path
) -> None:
    graph = traced(tmp_path, MODEL.format(layer=layer, model=model))
    with pytest.raises(InputError, match=words) as told:
        writing_calls(graph, ["layer"])
    assert "zero=1" in told.value.fix
