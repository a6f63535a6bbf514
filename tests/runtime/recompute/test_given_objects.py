"""A layer that runs again finds what it is given as it was the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.recompute.running_again import Mode, recompute


@dataclass
class Memory:
    """Keeps what layers hand to it, as a cache of keys does."""

    kept: list[Tensor] = field(default_factory=list)


class Remembering(nn.Module):
    """Reads all that was kept before, and keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        made = self.linear(x).tanh()
        kept.append(made)
        return torch.cat(kept, 1).square() @ torch.ones(4 * len(kept), 4)


class WithObject(Remembering):
    def forward(self, x: Tensor, kept: Any) -> Tensor:
        return super().forward(x, kept.kept)


class WithDict(Remembering):
    def forward(self, x: Tensor, kept: Any) -> Tensor:
        return super().forward(x, kept["kept"])


WAYS: Mapping[str, tuple[type[Remembering], Callable[[], Any]]] = {
    "list": (Remembering, list),
    "object": (WithObject, Memory),
    "dict": (WithDict, lambda: {"kept": []}),
}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_layers_that_run_once(way: str, mode: Mode) -> None:
    kind, new = WAYS[way]
    layers = nn.ModuleList(kind() for _ in range(3))

    def gradients() -> list[Tensor]:
        x, kept = torch.linspace(-1, 1, 8).view(2, 4), new()
        for layer in layers:
            x = layer(x, kept=kept)
        return list(torch.autograd.grad(x.sum(), list(layers.parameters())))

    expected = gradients()
    for layer in layers:
        recompute(layer, mode)
    for found, wanted in zip(gradients(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_what_the_first_run_writes_stays() -> None:
    layer, kept = Remembering(), list[Tensor]()
    recompute(layer, "full")
    layer(torch.ones(2, 4), kept).sum().backward()
    assert len(kept) == 1


def test_modules_and_functions_are_themselves_the_second_time() -> None:
    seen = []

    class Told(nn.Module):
        def forward(self, x: Tensor, told: list[Any]) -> Tensor:
            seen.append(told)
            return x.exp().sin()

    layer, inner = Told(), nn.Linear(2, 2)
    recompute(layer, "full")
    layer(torch.ones(2, requires_grad=True), [inner, lambda: 1]).sum().backward()
    first, second = seen
    assert first is not second
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_what_cannot_be_copied_is_handed_on() -> None:
    class Local:
        """A class that pickle does not find."""

    class Told(nn.Module):
        def forward(self, x: Tensor, told: object) -> Tensor:
            assert isinstance(told, Local)
            return x.exp()

    layer, x = Told(), torch.ones(2, requires_grad=True)
    recompute(layer, "full")
    layer(x, Local()).sum().backward()
    assert torch.equal(torch.as_tensor(x.grad), x.detach().exp())
