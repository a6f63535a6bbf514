"""Work to read a model grows with its layers, and no faster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.layers import find_layers
from autopar.planner.model.model_file import load_model_file
from autopar.planner.precision import Precision
from autopar.planner.trace import trace
from autopar.planner.trace.build import TracedSubject
from autopar.planner.trace.export import ExportedTrace, UnlikeSizesError, export
from tests.cells import cells
from tests.planner.trace.model_source import linear_model, traced, written

CHAIN = """
    class Chain(nn.Module):
        def __init__(self, widths):
            super().__init__()
            self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:] + [8]))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def build_model():
        return Chain([{widths}])
"""
LENGTHS = (10, 20, 40)


def calls_to_read(folder: Path, widths: list[int]) -> int:
    """Return how many calls of functions it takes until the layers of a chain stand.

    They are the same on a busy machine, where seconds are not.
    """
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        graph = traced(folder, CHAIN.format(widths=str(widths)[1:-1]))
        layers = find_layers(graph, infer_axes(graph))
    finally:
        sys.setprofile(None)
    assert len(layers.layers) == len(widths)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("kind", cells(("equal", "different"), ("different",)))
def test_the_work_of_reading_a_model_grows_as_its_layers_do(kind: str, tmp_path: Path) -> None:
    chains = [
        [4, *(range(8, 7 + count) if kind == "different" else [8] * (count - 1))]
        for count in LENGTHS
    ]
    calls_to_read(tmp_path, chains[0])  # what is loaded and compiled once
    few, more, many = (calls_to_read(tmp_path, chain) for chain in chains)
    # Of what each layer adds: twice as many layers add twice as much, and four times if squared.
    assert many - more < 2.05 * (more - few)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_sizes_that_do_not_match_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    tried: list[bool] = []
    path = written(tmp_path, linear_model("return self.linear(x) + torch.ones(3).expand(4)"))

    def noted(subject: TracedSubject, *, fold: bool, **how: Any) -> ExportedTrace:
        tried.append(fold)
        return export(subject, fold=fold, **how)

    monkeypatch.setattr("autopar.planner.trace.export", noted)
    with pytest.raises(UnlikeSizesError, match="expand a dimension of length 3"):
        trace(load_model_file(str(path)), precision=precision)
    assert tried == [True]
