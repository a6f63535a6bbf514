"""A chain of any number of linear layers: the model file of some rows of plan_speed.py."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def build_model(layers: int = 100, widths: str = "equal", activations: bool = False) -> nn.Module:
    """Build layers of one width, or (`widths=different`) each wider than the one before."""
    sizes = [64 + (number if widths == "different" else 0) for number in range(layers + 1)]
    chain: list[nn.Module] = []
    for before, after in pairwise(sizes):
        chain += [nn.Linear(before, after), *([nn.ReLU()] if activations else [])]
    return nn.Sequential(*chain)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return rows of random numbers."""
    return {"input": torch.randn(batch_size, 64)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean square of the outputs."""
    del batch
    return outputs.square().mean()
