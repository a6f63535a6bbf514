"""Models with more than parameters and buffers: what hangs on them, and on their tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.runtime.weights.ways.by_hand import counted


class NoDecay(nn.Parameter):
    """A parameter of a class of the user's."""


class Marked(torch.Tensor):
    """A tensor of a class of the user's."""


class Pair(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


@dataclass
class Cache:
    """An object that holds tensors."""

    table: Tensor
    others: dict[str, Tensor] = field(default_factory=dict)


@lru_cache
def _angles(size: int) -> Tensor:
    return torch.outer(torch.arange(size), torch.linspace(0, 1, 3)).cos()


class _Holding(nn.Module):
    """Holds tensors in every way but as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.plain = torch.arange(3) * 2
        self.listed = [torch.ones(2) / 3, [torch.zeros(1), 7]]
        self.named = {"a": torch.eye(2), "b": (torch.full((2,), 4.0), "text")}
        self.pair = Pair(torch.ones(1), torch.linspace(0, 1, 4))
        self.cache = Cache(torch.arange(4.0).sqrt(), {"c": torch.ones(2).double()})
        self.cached = _angles(4)
        self.same = self.plain
        self.views = list(torch.arange(6.0).unbind())
        table = torch.linspace(1, 2, 5)
        self.scaled: Callable[[Tensor], Tensor] = lambda x: x * table
        self.shifted = partial(torch.add, torch.ones(2) * 9)
        self.hidden = (counted(nn.Linear(2, 2)), [counted(nn.BatchNorm1d(2))])
        self.parameters_again = [self.weight]
        self.real = [torch.tensor([1.0]), torch.tensor([2.0])]


def _marked(_: Path) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    counted(model)
    weight: Any = NoDecay(model.get_parameter("0.weight").detach() * 2)
    weight.rate = 0.5
    model.get_submodule("0").weight = weight
    bias: Any = model.get_parameter("1.bias")
    bias._no_weight_decay = True
    bias.note = {"from": "here"}
    model.register_buffer("marked", torch.arange(4.0).as_subclass(Marked))
    read: Any = NoDecay(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), requires_grad=False)
    read.name_in_file = "w"
    model.register_parameter("read", read)
    return model


CERTAIN = {
    "held in every way": lambda _: _Holding(),
    "classes and attributes": _marked,
}
