"""Two views of each row, told from those of all other rows; its modules ask for numbers of rows.

What a rank of a split batch finds in a shape is its own share, wherever code may read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, PLACES = 16, 2, 3


class Attention(nn.Module):
    """Reads the rows of what it is given, and of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.queries = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, places, _ = x.shape
        three = self.queries(self.norm(x)).view(rows, places, 3, HEADS, WIDTH // HEADS)
        query, key, value = three.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return torch.as_tensor(x + mixed.transpose(1, 2).reshape(rows, places, WIDTH))


class Scaled(nn.Module):
    """Computes with the number of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x / x.shape[0]


class Like(nn.Module):
    """Reads the rows of another tensor, which no rank has in part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        turned = x.view(other.shape[0], 4, WIDTH // 4).transpose(1, 2)
        return torch.as_tensor(self.linear(turned.reshape(other.shape[0], WIDTH)))


class Told(Like):
    """Is told the rows as a number."""

    def forward(self, x: Tensor, rows: int) -> Tensor:  # type: ignore[override]
        return torch.as_tensor(self.linear(x.view(rows, 4, 4).transpose(1, 2).reshape(rows, WIDTH)))


class Kept(Like):
    """Finds the rows where its caller has left them."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        turned = x.view(self.rows, 4, 4).transpose(1, 2)
        return torch.as_tensor(self.linear(turned.reshape(self.rows, WIDTH)))


@dataclass
class Rows:
    """An object that knows them."""

    number: int


class Held(Like):
    """Asks an object for the rows."""

    def forward(self, x: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        turned = x.view(rows.number, 4, 4).transpose(1, 2)
        return torch.as_tensor(self.linear(turned.reshape(rows.number, WIDTH)))


@dataclass
class Compared:
    """The result, as libraries have it."""

    logits: Tensor


class Views(nn.Module):
    """Maps rows to the products of all their pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.embed = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.scaled, self.like, self.told = Scaled(), Like(), Told()
        self.kept, self.held = Kept(), Held()

    def encoded(self, x: Tensor) -> Tensor:
        """Map [rows, 8] to one vector of length one for each."""
        places = self.embed(x).unsqueeze(1).repeat(1, PLACES, 1)
        h = torch.cat([self.start.repeat(len(x), 1, 1), places], dim=1)
        for layer in self.layers:
            h = layer(h)
        h = self.told(self.like(self.scaled(h.mean(dim=1)), x), len(x))
        self.kept.rows = x.shape[0]
        return functional.normalize(self.held(self.kept(h), Rows(len(x))), dim=-1)

    def forward(self, x: Tensor, y: Tensor, sharpness: float) -> Compared:
        """Map two views to [rows, rows]."""
        return Compared(sharpness * self.encoded(x) @ self.encoded(y).t())


def build_model() -> nn.Module:
    """Return the model."""
    return Views()


def example_batch(batch_size: int) -> dict[str, Any]:
    """Return random rows, the same a little changed, and a number."""
    rows = torch.randn(batch_size, 8)
    return {"x": rows, "y": rows + 0.1 * torch.randn(batch_size, 8), "sharpness": 5.0}


def loss(outputs: Compared, batch: dict[str, Any]) -> Tensor:
    """Return how far each row is from being its own best match, both ways."""
    del batch
    logits = outputs.logits
    own = torch.arange(len(logits), device=logits.device)
    there, back = (functional.cross_entropy(one, own) for one in (logits, logits.t()))
    return (there + back) / 2
