"""Two views of each row, compared with those of all other rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pairs(nn.Module):
    """Maps each row to two vectors, and every pair of rows to a product."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 8] to [batch, batch]."""
        out: Tensor = self.left(x) @ self.right(x).t()
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Pairs()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random rows."""
    return {"x": torch.randn(batch_size, 8)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return how far each row is from being its own best match."""
    del batch
    return functional.cross_entropy(outputs, torch.arange(outputs.shape[0]))
