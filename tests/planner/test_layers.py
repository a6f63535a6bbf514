"""Layers are the repeated blocks of a model, and equal ones are found."""

from itertools import pairwise

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.layers import Layers, find_layers
from tests.planner.subjects import ZOO_MODELS, family_graph, zoo_graph


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


def test_depth_adds_no_classes() -> None:
    shallow, deep = layers_of("llama.py", "layers=3"), layers_of("llama.py", "layers=24")
    assert len(shallow.classes) == len(deep.classes)
    assert len(deep.layers) - len(shallow.layers) == 21


def test_the_first_block_of_each_t5_stack_is_a_class_of_its_own() -> None:
    graph = family_graph("T5")
    layers = find_layers(graph, infer_axes(graph))
    blocks = {layer.call: layer.layer_class for layer in layers.layers if ".block." in layer.call}
    assert blocks["encoder.block.0"] != blocks["encoder.block.1"]
    assert len(blocks) == 4


def test_residual_blocks_that_change_the_width_are_apart() -> None:
    counts = [count for _, count in runs_of(layers_of("resnet.py", "size=20"))]
    assert max(counts) == 3  # the first stage of ResNet-20: three equal blocks
