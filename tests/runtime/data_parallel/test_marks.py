"""What marks parameters, their classes and attributes, stays where others take their place."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from autopar.runtime.data_parallel.wrapping import wrap
from autopar.runtime.optimizer.building import build_optimizer
from autopar.runtime.ranks.mesh import start
from autopar.runtime.weights.initial_weights import record
from tests.runtime.processes import run_on_ranks


class NoDecay(nn.Parameter):
    """A parameter of a class of the user's."""


class Scaled(nn.Linear):
    """Computes by what hangs on its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.bias = NoDecay(torch.zeros(width))
        weight: Any = self.weight
        weight.factor = 3.0

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        assert isinstance(self.bias, NoDecay)
        return super().forward(x) * float(weight.factor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(Scaled(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Told(SGD):
    """Notes what it is given, and what it steps."""

    stepped: tuple[tuple[str, float], ...] = ()

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        decays = [one for one in given if not isinstance(one, NoDecay)]
        others = [one for one in given if isinstance(one, NoDecay)]
        groups: Any = [
            {"params": decays, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=0.5)

    def step(self, closure: Any = None) -> Any:
        held = [one for group in self.param_groups for one in group["params"]]
        self.stepped = tuple((type(one).__name__, getattr(one, "factor", 1.0)) for one in held)
        return super().step(closure)


def _plain() -> tuple[list[float], tuple[tuple[str, float], ...]]:
    model = Net()
    optimizer = Told(model.parameters())
    return _losses(model, optimizer), optimizer.stepped


def _losses(model: nn.Module, optimizer: Optimizer) -> list[float]:
    found = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 8).view(2, 4))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _trained(zero: int) -> None:
    mesh = start(pipeline=1, data=2, tensor=1)
    model, recipe = record(Net, seed=0)
    layers: Any = model.layers
    wrap(model, mesh, zero=zero, units=list(layers))
    recipe.materialise(model, {}, mesh.tensor, mesh.device)
    optimizer: Any = build_optimizer([model], Told, zero=zero, mesh=mesh)
    losses, (expected, stepped) = _losses(model, optimizer), _plain()
    torch.testing.assert_close(losses, expected)
    assert set(optimizer.stepped) <= set(stepped)  # under ZeRO-1 a rank steps some of them


def _trained_in_every_way() -> None:
    for zero in range(4):
        _trained(zero)


def test_what_marks_parameters_is_read_by_forwards_and_optimizers() -> None:
    run_on_ranks(_trained_in_every_way, 2)
