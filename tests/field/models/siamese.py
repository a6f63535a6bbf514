"""One encoder for three batches, whose norm takes their statistics one after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN, CODE = 20, 64, 16


class Siamese(nn.Module):
    """Compares an anchor with what is like it and with what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.PReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.LeakyReLU(0.1),
            nn.Linear(HIDDEN, CODE),
        )

    def forward(self, anchor: Tensor, like: Tensor, unlike: Tensor) -> Tensor:
        """Return the loss."""
        one, same, other = (
            functional.normalize(self.encoder(x), dim=-1) for x in (anchor, like, unlike)
        )
        apart = (1 - functional.cosine_similarity(one, same)).mean()
        return functional.triplet_margin_loss(one, same, other, margin=0.3) + 0.1 * apart


def build_model() -> nn.Module:
    """Return the model."""
    return Siamese()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random numbers."""
    return {name: torch.randn(batch_size, WIDTH) for name in ("anchor", "like", "unlike")}
