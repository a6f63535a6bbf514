"""A recommender (DLRM): tables of embeddings, their products in pairs, perceptrons around them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of

TABLES, ENTRIES, DENSE, WIDTH = 4, 30, 6, 8


class Dlrm(nn.Module):
    """Scores whether a person clicks."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ENTRIES, WIDTH, mode="sum") for _ in range(TABLES)
        )
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU()
        )
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Map numbers and the entries of each table to scores."""
        x = self.bottom(dense)
        found = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([x, *found], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        rows, columns = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        out: Tensor = self.top(torch.cat([x, products[:, rows, columns]], dim=1))
        return out.squeeze(1)


def build_model() -> nn.Module:
    """Return the model."""
    return Dlrm()


def _row(numbers: Generator) -> Row:
    return {
        "dense": torch.randn(DENSE, generator=numbers),
        "sparse": torch.randint(ENTRIES, (TABLES, 3), generator=numbers),
        "clicked": torch.randint(2, (), generator=numbers).float(),
    }


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return what is known of so many visits."""
    return example_of(_row, batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of clicks."""
    return functional.binary_cross_entropy_with_logits(outputs, batch["clicked"])


def build_dataset() -> Rows:
    """Return the visits."""
    return Rows(_row)
