"""Modules in a dict by numbers, with a forward of their own each, and one that all of them hold.

The last is also given a module and an object by name, and the rows of a table are all taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.field.blocks import LENGTH, VOCAB, WIDTH, token_batch, token_loss


@dataclass(frozen=True)
class Way:
    """How features are mixed."""

    power: float = 1.0


class Mixer(nn.Module):
    """Decides in its __init__ which of its forwards is meant."""

    def __init__(self, norm: nn.Module, *, is_narrow: bool) -> None:
        super().__init__()
        self.norm = norm
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.forward = self.forward_halves if is_narrow else self.forward_whole

    def forward_whole(self, x: Tensor) -> Tensor:
        """Mix all of the features."""
        out: Tensor = self.narrow(functional.gelu(self.wide(self.norm(self.dropout(x)))))
        return out + x

    def forward_halves(self, x: Tensor) -> Tensor:
        """Mix them, and swap the halves."""
        first, second = self.forward_whole(x).chunk(2, dim=-1)
        return second * first.tanh() + x.mean(-1, keepdim=True)


class Parts(nn.ModuleDict):
    """Modules that are called in their order, as torchvision's backbones are."""

    def forward(self, x: Tensor) -> Tensor:
        """Call them all."""
        for module in self.values():
            x = module(x)
        return x


class Told(nn.Module):
    """Does more where it is told how, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(
        self, x: Tensor, *, bias: nn.Module | None = None, way: Way | None = None
    ) -> Tensor:
        """Map features to as many."""
        x = self.linear(x) if bias is None else self.linear(x) + bias(x)
        return x if way is None else x * x.abs() ** way.power


class Odd(nn.Module):
    """Six mixers under numbers as names, then one with halves, and two that are told more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.shared, self.bias = nn.LayerNorm(WIDTH), nn.Linear(WIDTH // 2, WIDTH // 2)
        self.parts = Parts({str(i): Mixer(self.shared, is_narrow=False) for i in range(6)})
        self.last, self.head = Mixer(self.shared, is_narrow=True), nn.Linear(WIDTH // 2, VOCAB)
        self.biased, self.powered = Told(), Told()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.embed(input_ids) + self.places[: input_ids.shape[1]]
        x = self.biased(self.last(self.parts(x)), bias=self.bias)
        out: Tensor = self.head(self.powered(x, way=Way()))
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Odd()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
