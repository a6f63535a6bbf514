"""Layers that cannot run again in their backward are known before a plan is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.costs.prediction import Recompute
from autopar.planner.findings.writes import unable
from autopar.planner.layers import find_layers
from autopar.planner.precision import Precision
from tests.planner.trace.model_source import traced

MODEL = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        {layer}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        {model}

def build_model():
    return Model()
"""
PLAIN = "return x"
ALONE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ self.weight

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("layer", "model", "modes"),
    [
        ("return self.linear(x).relu()", PLAIN, set()),
        ("return self.linear(x).relu_()", PLAIN, {"selective"}),
        ("y = torch.einsum('bi,oi->bo', x, self.linear.weight); y *= 2; return y.exp()", PLAIN,
         {"selective"}),
        ("y = self.linear(x.exp()); y *= 2; return y", PLAIN, set()),
        ("y = self.linear(x); y[:, 0] = 0; return y.exp()", PLAIN, {"selective"}),
        ("return self.linear(x).exp().relu_()", PLAIN, set()),
        ("x += self.linear(x); return x.exp()", "y = x + 1; return self.layers[0](y) * y",
         {"selective", "full", "full-host"}),
        ("x[:, 0] = 0; return self.linear(x)", "y = x + 1; return self.layers[0](y) * y",
         {"selective", "full", "full-host"}),
        ("y = self.linear(x); self.seen = y; return y.exp()",
         "return x + self.layers[1].seen.mul_(2)", {"selective"}),
        ("w = self.linear.weight.repeat(3, 1); return torch.gru_cell(x, x, w, w)", PLAIN,
         {"selective"}),
    ],
)  # fmt: skip
def test_a_layer_that_a_copy_or_a_kept_result_would_make_wrong(
    layer: str, model: str, modes: set[str], tmp_path: Path
) -> None:
    graph = traced(tmp_path, MODEL.format(layer=layer, model=model))
    layers = find_layers(graph, infer_axes(graph)).layers
    unables = unable(layers, graph, precision=Precision.FP32)
    found = [{mode for mode in modes if mode.runs_again} for modes in unables]
    assert set(map(Recompute, modes)) in found
    assert all(one <= set(map(Recompute, modes)) for one in found)


def test_a_model_that_holds_its_weights_itself(tmp_path: Path) -> None:
    graph = traced(tmp_path, ALONE)
    layers = find_layers(graph, infer_axes(graph)).layers
    (without,) = unable(layers, graph, precision=Precision.FP32)
    assert without.keys() == set(Recompute) - {Recompute.NONE}
    assert "in the model's own forward" in without[Recompute.FULL].why
