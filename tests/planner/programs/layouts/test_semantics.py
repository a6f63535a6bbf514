"""Whatever layouts the program chooses, every rank's loss and gradients are the unsplit model's."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from autopar.planner.axes.infer import GraphAxes, infer_axes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.layouts import WHOLE, LayoutKind, OpLayout
from autopar.planner.layers import Layers, find_layers
from autopar.planner.programs.layouts.choice import Budget, LayoutSolution
from autopar.planner.programs.layouts.rules import find_slots
from tests.cells import cells
from tests.planner.programs.layouts.layout_checks import check, solve_layouts
from tests.planner.programs.layouts.layout_interpreter import Interpreter, tensors_from_outside
from tests.planner.programs.layouts.random_pricer import RandomPricer
from tests.planner.subjects import zoo_file, zoo_graph

BATCH = 4
MODELS = ("gpt2.py", "llama.py", "bert.py", "t5.py", "vit.py", "resnet.py")


@cache
def _subject(model: str) -> tuple[Graph, GraphAxes, Layers, dict[str, Tensor]]:
    graph = zoo_graph(model)
    axes = infer_axes(graph)
    file = zoo_file(model)
    torch.manual_seed(1)
    batch = file.example_batch(BATCH)
    buffers = dict(file.build_model().named_buffers())
    outside = tensors_from_outside(graph, batch, buffers, BATCH)
    return graph, axes, find_layers(graph, axes), outside


def _grads(
    interpreter: Interpreter, outside: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and each parameter's gradient put together from the ranks'."""
    leaves = {name: interpreter.place(name, value) for name, value in outside.items()}
    losses = interpreter.run()
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-12, atol=1e-12)
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    found = {}
    for parameter in interpreter.graph.parameters:
        if not parameter.trainable or parameter.name not in leaves:
            continue
        own = [
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            for leaf in leaves[parameter.name]
        ]
        layout = interpreter.values[parameter.name][0]
        cut = interpreter.cut(parameter.name, layout)
        if cut is not None:
            found[parameter.name] = cut.joined(own)
        elif layout.kind is LayoutKind.REPLICATED:
            found[parameter.name] = torch.stack(own).sum(0)
        else:
            for other in own[1:]:
                torch.testing.assert_close(other, own[0], rtol=1e-9, atol=1e-11)
            found[parameter.name] = own[0]
    return losses[0], found


@cache
def _unsplit(model: str) -> tuple[Tensor, dict[str, Tensor]]:
    graph, axes, layers, outside = _subject(model)
    layouts = tuple(
        tuple(
            OpLayout(letter="", axis="", needs=(WHOLE,) * len(op.inputs),
                     gives=(WHOLE,) * len(op.outputs))
            for op in layers.layers[own.layers[0]].ops
        )
        for own in layers.classes
    )  # fmt: skip
    interpreter = Interpreter(
        graph, axes, layers, layouts=layouts, outside=(), ranks=1, batch=BATCH
    )
    return _grads(interpreter, outside)


def _solved(model: str, *, seed: int, ranks: int) -> LayoutSolution:
    graph, axes, layers, _ = _subject(model)
    slots = find_slots(graph, axes, layers)
    pricer = RandomPricer(graph, slots, batch=BATCH, seed=seed)
    shape = GroupShape(ranks=ranks, crossings=())
    return solve_layouts(
        graph, axes, layers, pricer, degree=ranks, shape=shape, budget=Budget(points=1)
    )[0]


CELLS = list(product(MODELS, (0, 1), (2, 3)))
STAND = [cell for number, cell in enumerate(CELLS) if number % 2 == number // 4 % 2]  # in turns


@pytest.mark.parametrize(("model", "seed", "ranks"), cells(CELLS, STAND))
def test_split_ranks_compute_what_one_device_does(model: str, seed: int, ranks: int) -> None:
    graph, axes, layers, outside = _subject(model)
    solution = _solved(model, seed=seed, ranks=ranks)
    check(
        graph, axes, layers, layouts=solution.layouts, parameters=solution.parameters,
        crossing=solution.crossing, degree=ranks, batch=BATCH,
    )  # fmt: skip
    interpreter = Interpreter(
        graph, axes, layers, layouts=solution.layouts,
        outside=(*solution.parameters, *solution.crossing), ranks=ranks, batch=BATCH,
    )  # fmt: skip
    loss, grads = _grads(interpreter, outside)
    expected_loss, expected = _unsplit(model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        scale = float(expected[name].abs().max()) + 1e-12
        assert float((grad - expected[name]).abs().max()) <= 1e-8 * scale + 1e-11, name
