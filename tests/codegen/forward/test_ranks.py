"""Whatever layouts are chosen, opened classes on ranks compute what one process does."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from autopar.codegen.forward.emit import open_split
from autopar.codegen.forward.opened import OpenedSource
from autopar.codegen.forward.reading.split import SplitGraph, split_graph
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.graph.layouts import LayoutKind
from autopar.planner.layers import find_layers
from autopar.planner.programs.layouts.choice import Budget
from autopar.planner.programs.layouts.rules import find_slots
from autopar.planner.programs.layouts.strategies import parts_of
from tests.cells import cells
from tests.codegen.forward.running import Result, original, zoo_modules
from tests.codegen.forward.split_training import Cuts, rank_result
from tests.planner.programs.layouts.layout_checks import solve_layouts
from tests.planner.programs.layouts.random_pricer import RandomPricer
from tests.planner.programs.layouts.simulated_ranks import Cut
from tests.planner.subjects import zoo_graph
from tests.runtime.processes import run_on_ranks

# Arguments as tests/codegen/matrix_cells.py spells them: one worker traces each model once.
MODELS: dict[str, tuple[str, ...]] = {
    "gpt2.py": ("dropout=0.0",),
    "llama.py": (),
    "bert.py": ("dropout=0.0",),
    "t5.py": ("dropout=0.0",),
    "vit.py": ("dropout=0.0",),
    "transformer_lm.py": ("dropout=0.0",),
    "mnist.py": (),
}


@cache
def random_split(name: str, *, seed: int, ranks: int) -> SplitGraph:
    """Return a zoo model with the best layouts under random prices: anything may be split."""
    graph = zoo_graph(name, *MODELS[name])
    axes = infer_axes(graph)
    layers = find_layers(graph, axes)
    pricer = RandomPricer(graph, find_slots(graph, axes, layers), batch=4, seed=seed)
    solution = solve_layouts(
        graph, axes, layers, pricer,
        degree=ranks, shape=GroupShape(ranks=ranks, crossings=()), budget=Budget(points=1),
    )[0]  # fmt: skip
    return split_graph(
        graph, zoo_modules(name, *MODELS[name]), degree=ranks, batch=4, layouts=solution.layouts,
        outside=(*solution.parameters, *solution.crossing),
    )  # fmt: skip


def cuts_of(split: SplitGraph) -> Cuts:
    """Return how the parameters and buffers are cut."""
    names = [p.name for p in split.graph.parameters] + [b.name for b in split.graph.buffers]
    layouts = {name: split.made(name) for name in names}
    return {
        name: (x.dim, parts_of(split.axes.dims[name][x.dim], x.axis, 1))
        for name, x in layouts.items()
        if x.kind is LayoutKind.SPLIT
    }


def check_ranks(name: str, split: SplitGraph, opened: OpenedSource, expected: Result) -> None:
    """Run the printed classes on ranks and compare with one process."""
    cuts = cuts_of(split)
    found = run_on_ranks(rank_result, split.degree, name, MODELS[name], opened, cuts)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected[0], rtol=1e-10, atol=1e-10)
    for parameter in split.graph.parameters:
        own = [grads[parameter.name] for _, grads in found]
        whole = own[0]
        if parameter.name in cuts:
            whole = Cut(*cuts[parameter.name], split.degree).joined(own)
        elif split.made(parameter.name).kind is LayoutKind.REPLICATED:
            whole = torch.stack(own).sum(0)
        wanted = expected[1][parameter.name]
        scale = float(wanted.abs().max()) + 1e-12
        assert float((whole - wanted).abs().max()) <= 1e-8 * scale + 1e-11, parameter.name


CELLS = list(product(MODELS, (0, 1), (2, 3)))
STAND = [*((name, 0, 2) for name in MODELS), ("gpt2.py", 1, 3)]


@pytest.mark.parametrize(("name", "seed", "ranks"), cells(CELLS, STAND))
def test_split_ranks_compute_what_one_process_does(name: str, seed: int, ranks: int) -> None:
    split = random_split(name, seed=seed, ranks=ranks)
    opened = open_split(split, [len(split.layers.layers)])
    check_ranks(name, split, opened, original(name, *MODELS[name])[1])


@pytest.mark.parametrize("name", cells(["gpt2.py", "t5.py", "llama.py"], ["t5.py"]))
def test_stages_of_split_ranks_compute_what_one_process_does(name: str) -> None:
    split = random_split(name, seed=1, ranks=2)
    count = len(split.layers.layers)
    opened = open_split(split, [count // 3, count // 3, count - 2 * (count // 3)])
    check_ranks(name, split, opened, original(name, *MODELS[name])[1])
