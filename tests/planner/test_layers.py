"""Layers are the repeated blocks of a model, and equal ones are found."""

from itertools import pairwise
from pathlib import Path

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.layers import Layers, find_layers
from tests.planner.subjects import ZOO_MODELS, family_graph, zoo_graph
from tests.planner.trace.model_source import traced

SKIPPING = """
class Joining(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x, y):
        return self.linear(torch.cat((x, y), dim=1)).tanh()

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks, self.last = nn.ModuleList(Joining() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x):
        x, y = self.first(x), self.other(x)
        x = self.blocks[0](x, x.tanh())
        return self.last(self.blocks[1](x, y))

def build_model():
    return Skipping()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 8)}

def loss(outputs, batch):
    return outputs.square().mean()
"""


def layers_of(name: str, *arguments: str) -> Layers:
    graph = zoo_graph(name, *arguments)
    return find_layers(graph, infer_axes(graph))


def runs_of(layers: Layers) -> list[tuple[str, int]]:
    return [(layers.classes[run.layer_class].name, run.count) for run in layers.runs]


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_every_op_is_in_one_layer_and_the_order_is_kept(name: str) -> None:
    graph = zoo_graph(name)
    layers = find_layers(graph, infer_axes(graph))
    names = [op.name for layer in layers.layers for op in layer.ops]
    assert sorted(names) == sorted(op.name for op in graph.ops)
    starts = {op.name: i for i, op in enumerate(graph.ops)}
    assert all(starts[a.ops[0].name] < starts[b.ops[0].name] for a, b in pairwise(layers.layers))


def test_twelve_blocks_are_one_run() -> None:
    assert ("Block", 12) in runs_of(layers_of("gpt2.py", "size=124m"))


def test_the_first_block_of_each_t5_stack_is_a_class_of_its_own() -> None:
    graph = family_graph("T5")
    layers = find_layers(graph, infer_axes(graph))
    blocks = {layer.call: layer.layer_class for layer in layers.layers if ".block." in layer.call}
    assert blocks["encoder.block.0"] != blocks["encoder.block.1"]
    assert len(blocks) == 4


def test_residual_blocks_that_change_the_width_are_apart() -> None:
    counts = [count for _, count in runs_of(layers_of("resnet.py", "size=20"))]
    assert max(counts) == 3  # the first stage of ResNet-20: three equal blocks


def test_layers_whose_axes_are_unlike_are_no_equals(tmp_path: Path) -> None:
    graph = traced(tmp_path, SKIPPING)  # one joins x with x, which can be split, one with y
    blocks = [x for x in find_layers(graph, infer_axes(graph)).layers if "blocks" in x.call]
    assert len({block.layer_class for block in blocks}) == len(blocks) == 2
