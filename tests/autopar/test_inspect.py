"""`autopar inspect`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import networkx as nx
import pytest

from tests.autopar.commands import Autopar

MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def example_batch(batch_size):
    return {"input": torch.zeros(batch_size, 8), "target": torch.zeros(batch_size, 8)}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["target"])
"""
WITH_SGD = """

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum={momentum})
"""
PARAMETERS = 8 * 16 + 16 + 16 * 8 + 8


@pytest.mark.parametrize(
    ("text", "name", "numbers"),
    [
        (MODEL, "AdamW", 2),
        (MODEL + WITH_SGD.format(momentum=0.9), "SGD", 1),
        (MODEL + WITH_SGD.format(momentum=0.0), "SGD", 0),
    ],
)
def test_it_tells_what_the_optimizer_of_the_model_keeps(
    autopar: Autopar, tmp_path: Path, text: str, name: str, numbers: int
) -> None:
    path = tmp_path / "model.py"
    path.write_text(text, encoding="utf-8")
    ran = autopar("inspect", str(path), "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["optimizer"] == name
    assert found["states"][0]["optimizer_bytes"] == numbers * 4 * PARAMETERS
    assert f"with {name}" in autopar("inspect", str(path)).out


def test_each_op_is_told_with_what_it_computes_moves_keeps_and_takes(
    autopar: Autopar, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    command = ("inspect", str(tmp_path / "model.py"), "--ops", "--batch", "4", "--device", "cpu")
    first, second, loss = json.loads(autopar(*command, "--precision", "fp32", "--json").out)
    assert first["target"] == "aten.linear.default"
    assert first["forward_flops"] == second["forward_flops"] == 2 * 4 * 8 * 16
    assert first["backward_flops"] == 2 * 4 * 8 * 16  # nobody wants the gradient of the input
    assert second["backward_flops"] == 2 * 2 * 4 * 8 * 16
    assert first["kept_bytes"] == 4 * 4 * 8
    assert all(one["forward_seconds"] > 0 for one in (first, second, loss))
    page = autopar(*command).out
    assert "linear" in page
    assert "mse_loss" in page


OF_ITS_TYPE = """
class Net(nn.Linear):
    def forward(self, input):
        out = super().forward(input)
        return out.sin() if out.dtype == torch.bfloat16 else out


def build_model():
    return Net(8, 8)
"""


def test_the_ops_are_those_of_the_precision(autopar: Autopar, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + OF_ITS_TYPE, encoding="utf-8")
    command = ("inspect", str(tmp_path / "model.py"), "--ops", "--json", "--precision")
    ops = {kind: json.loads(autopar(*command, kind).out) for kind in ("bf16", "fp32")}
    assert "aten.sin.default" in [one["target"] for one in ops["bf16"]]
    assert "aten.sin.default" not in [one["target"] for one in ops["fp32"]]


GATED = """
class Gated(nn.Linear):
    def forward(self, input):
        one, other = super().forward(input).chunk(2, -1)
        return one * other


def build_model():
    return Gated(8, 16)
"""


@pytest.mark.parametrize("kind", ["graphml", "dot"])
def test_an_op_that_reads_two_results_of_another_has_two_edges(
    autopar: Autopar, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL + GATED, encoding="utf-8")
    path = tmp_path / f"model.{kind}"
    assert autopar("inspect", str(tmp_path / "model.py"), "--graph", str(path)).code == 0
    text = path.read_text(encoding="utf-8")
    if kind == "dot":
        assert len(re.findall(r'"chunk" -> "mul" \[tensor="chunk', text)) == 2
    else:
        graph = nx.read_graphml(path)
        assert graph.number_of_edges("chunk", "mul") == 2
        ids = re.findall(r'<edge [^>]*id="(\w+)"', text)
        assert len(ids) == len(set(ids)) == graph.number_of_edges()


@pytest.mark.parametrize("kind", ["graphml", "dot"])
def test_the_annotated_graph_is_a_file_that_others_read(
    autopar: Autopar, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    path = tmp_path / f"model.{kind}"
    command = ("inspect", str(tmp_path / "model.py"), "--graph", str(path), "--precision", "fp32")
    assert autopar(*command).code == 0
    if kind == "graphml":
        graph = nx.read_graphml(path)
        assert nx.has_path(graph, "input", list(graph)[-1])
        assert {one["kind"] for _, one in graph.nodes(data=True)} >= {"op", "parameter", "input"}
        held = {
            name: one["held_bytes"] for name, one in graph.nodes(data=True) if one["kind"] != "op"
        }
        assert held["0.weight"] == 4 * 8 * 16
        assert all(held.values())
        works = ("forward_flops", "moved_bytes", "kept_bytes", "forward_seconds")
        ops = [one for _, one in graph.nodes(data=True) if one["kind"] == "op"]
        assert all(name in one for one in ops for name in works)
    else:
        text = path.read_text(encoding="utf-8")
        assert text.count(" -> ") == text.count("tensor=") == 8
        assert 'dims="16 × 8"' in text
        assert " shape=" not in text  # Graphviz would draw nodes of that form
    assert autopar(*command).code == 0  # its own file may be written anew
    path.write_text("mine", encoding="utf-8")
    assert autopar(*command).code == 2
    assert path.read_text(encoding="utf-8") == "mine"
