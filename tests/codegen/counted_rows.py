"""A model file whose loss counts rows in one of several ways, with a dataset of any length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

WIDTH, TOKENS, CLASSES = 8, 4, 6
IGNORED = -100
Row = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.narrow(functional.gelu(self.wide(x)))
        return made


class Model(nn.Module):
    """Layers of which half may be a stage; batch norms take statistics of all rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(TOKENS) if kind == "norm" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def build_model(kind: str = "mean", rows: int = 11) -> nn.Module:
    del rows
    return Model(kind)


def example_batch(batch_size: int, kind: str = "mean", rows: int = 11) -> Row:
    del rows
    made = [_row(number, kind) for number in range(batch_size)]
    return {key: torch.stack([row[key] for row in made]) for key in made[0]}


def loss(outputs: Tensor, batch: Row, kind: str = "mean", rows: int = 11) -> Tensor:
    del rows
    if kind in ("mean", "norm"):
        return functional.mse_loss(outputs, batch["wanted"])
    if kind == "sum":
        return functional.mse_loss(outputs, batch["wanted"], reduction="sum") / 10
    logits = outputs.flatten(0, 1)
    first = functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED)
    if kind == "targets":
        return first
    second = functional.cross_entropy(-logits, batch["others"].flatten(), ignore_index=IGNORED)
    return first + 0.5 * second + 0.1 * outputs.square().mean()


def build_optimizer(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


class Listed:
    """Rows by their numbers."""

    def __init__(self, kind: str, rows: int) -> None:
        self.kind, self.rows = kind, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Row:
        return _row(number, self.kind)


class Streamed(torch.utils.data.IterableDataset[Row]):
    """The same rows in the order in which they come, with a length."""

    def __init__(self, kind: str, rows: int) -> None:
        self.kind, self.rows = kind, rows

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Any:
        return (_row(number, self.kind) for number in range(self.rows))


def build_dataset(kind: str = "mean", rows: int = 11) -> Any:
    return Listed(kind, rows)


def _row(number: int, kind: str) -> Row:
    """Return a row; of its targets as many count as its number says."""
    numbers = torch.Generator().manual_seed(number)
    x = torch.randn(TOKENS, WIDTH, generator=numbers)
    if kind in ("mean", "norm", "sum"):
        return {"x": x, "wanted": torch.randn(TOKENS, CLASSES, generator=numbers)}
    labels = torch.randint(CLASSES, (TOKENS,), generator=numbers)
    others = labels.flip(0).clone()
    labels[number % TOKENS + 1 :] = IGNORED
    row = {"x": x, "labels": labels}
    return row if kind == "targets" else {**row, "others": others}
