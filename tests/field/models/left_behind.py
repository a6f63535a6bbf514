"""A forecaster that finds again what its earlier calls have left behind, as RevIN is written.

Its blocks reach their layers through a function that they have made of them, and raise errors of
their own over any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

PLACES, CHANNELS, WIDTH = 6, 4, 16


class Reversible(nn.Module):
    """Takes mean and spread from each row, and puts them back in a later call."""

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "take":
            self._measure(x)
            return (functional.pad(x, (0, 0, 0, 2)) - self.mean) / self.spread
        return x[:, : self.end] * self.spread + self.mean

    def _measure(self, x: Tensor) -> None:
        self.mean = x.mean(1, keepdim=True).detach()
        self.spread = x.std(1, keepdim=True).detach() + 0.1
        self.end = x.shape[1]


class Block(nn.Module):
    """Mixes features in a function of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleDict(
            {"wide": nn.Linear(WIDTH, 4 * WIDTH), "narrow": nn.Linear(4 * WIDTH, WIDTH)}
        )
        self.norm, self.layers = nn.LayerNorm(WIDTH), layers
        wide, narrow = layers["wide"], layers["narrow"]
        self.mix: Callable[[Tensor], Tensor] = lambda x: narrow(functional.gelu(wide(x)))

    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.as_tensor(x + self.mix(self.norm(x)))
        except Exception as error:
            raise ValueError(f"wrong features of shape {tuple(x.shape)}") from error


class Head(nn.Module):
    """Calls what its caller has called before."""

    def __init__(self, reversible: Reversible) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.reversible = reversible

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.reversible(self.linear(self.norm(x)), "give")
        return out


class Forecaster(nn.Module):
    """Four blocks between the two calls of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.reversible = Reversible()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = Head(self.reversible)

    def forward(self, series: Tensor) -> Tensor:
        x = self.embed(self.reversible(series, "take"))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Forecaster()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random series, and what follows them."""
    shape = (batch_size, PLACES, CHANNELS)
    return {"series": torch.randn(shape), "following": torch.randn(shape)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(outputs, batch["following"])
