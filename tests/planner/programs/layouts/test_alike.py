"""What unlike layers of one kind have in common is split in one way, whatever that costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor, nn

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.layers import find_layers
from autopar.planner.programs.layouts.choice import Budget
from autopar.planner.programs.layouts.rules import find_slots
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of
from tests.planner.programs.layouts.layout_checks import solve_layouts
from tests.planner.programs.layouts.random_pricer import RandomPricer


class Block(nn.Module):
    """A layer of two products; some have an adapter beside the first."""

    def __init__(self, *, is_adapted: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.adapter = nn.Linear(4, 8) if is_adapted else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        if self.adapter is not None:
            y = y + self.adapter(x)
        made: Tensor = x + self.down(y.relu())
        return made


class Other(nn.Module):
    """A layer of another kind, of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(x).relu())
        return made


class Model(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(8, 4), nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def letters(layers: Sequence[nn.Module], seed: int) -> list[dict[str, str]]:
    """Return for each kind of layer which letter of each product is split, where costs are odd."""
    graph = trace(file_of(lambda: Model(layers)))
    axes = infer_axes(graph)
    found = find_layers(graph, axes)
    pricer = RandomPricer(graph, find_slots(graph, axes, found), batch=4, seed=seed)
    front = solve_layouts(
        graph, axes, found, pricer, degree=2, shape=GroupShape(ranks=2, crossings=()),
        budget=Budget(bytes=(10.0**9,)),
    )  # fmt: skip
    made = []
    for number, kind in enumerate(found.classes):
        layer = found.layers[kind.layers[0]]
        paired = zip(layer.ops, front[0].layouts[number], strict=True)
        split = {op.call.removeprefix(layer.call): layout.letter for op, layout in paired}
        if {".up", ".down"} <= split.keys():
            made.append(split)
    return made


@pytest.mark.parametrize("seed", range(6))
def test_layers_with_and_without_adapters_are_split_alike(seed: int) -> None:
    plain, adapted = letters([Block(is_adapted=False), Block(is_adapted=True)], seed)
    assert ".adapter" in adapted
    assert all(adapted[name] == plain[name] for name in (".up", ".down"))


def test_layers_of_unlike_kinds_are_split_each_for_itself() -> None:
    apart = [letters([Block(is_adapted=True), Other()], seed) for seed in range(6)]
    assert any(one[".up"] != other[".up"] for one, other in apart)
