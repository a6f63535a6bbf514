"""Sums, means and maxima of rows of a table, as the forms of nn.EmbeddingBag take them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

ENTRIES, WIDTH, LENGTH = 41, 8, 3  # two ranks have unequal numbers of entries


class Bags(nn.Module):
    """A table whose rows are put in bags, and what is made of these."""

    def __init__(self, mode: str, form: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(
            ENTRIES,
            WIDTH,
            mode=mode,
            include_last_offset=form == "last offset",
            padding_idx=None if form == "plain" else 1,
            sparse=form == "sparse",
        )
        self.weights = nn.Linear(LENGTH, LENGTH) if form == "weighed" else None
        self.inner, self.outer = nn.Linear(WIDTH, 12), nn.Linear(12, 1)
        self.form = form

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Map the entries of each row to a number."""
        x = torch.tanh(self.inner(self.bags(ids, weights)))
        out: Tensor = self.outer(x)
        return out.squeeze(-1)

    def bags(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Return a bag for each row."""
        if self.form in ("offsets", "last offset"):
            more = 1 if self.form == "last offset" else 0
            starts = torch.arange(0, ids.numel() + more, ids.shape[1], device=ids.device)
            flat: Tensor = self.table(ids.flatten(), starts)
            return flat
        weighed = None if self.weights is None else torch.sigmoid(self.weights(weights))
        found: Tensor = self.table(ids, per_sample_weights=weighed)
        return found


def build_model(mode: str, form: str) -> nn.Module:
    """Return the model."""
    return Bags(mode, form)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random entries, with weights, of which some forms make use."""
    return {
        "ids": torch.randint(ENTRIES, (batch_size, LENGTH)),
        "weights": torch.rand(batch_size, LENGTH),
        "target": torch.rand(batch_size),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(outputs, batch["target"])
