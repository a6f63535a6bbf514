"""Three losses in one: the next token, the class of the row, and a number for each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss

CLASSES = 5


class ThreeHeads(nn.Module):
    """Blocks with three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tokens = nn.Linear(WIDTH, VOCAB)
        self.kind = nn.Linear(WIDTH, CLASSES)
        self.number = nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map tokens to the three."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        pooled = x.mean(1)
        return self.tokens(x), self.kind(pooled), self.number(pooled).squeeze(-1)


def build_model() -> nn.Module:
    """Return the model."""
    return ThreeHeads()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens, classes and numbers."""
    rows = {"kind": torch.randint(CLASSES, (batch_size,)), "number": torch.randn(batch_size)}
    return {**token_batch(batch_size), **rows}


def loss(outputs: tuple[Tensor, Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the weighted sum of the three."""
    tokens, kind, number = outputs
    by_row = functional.cross_entropy(kind, batch["kind"]) + 0.1 * functional.mse_loss(
        number, batch["number"]
    )
    return token_loss(tokens, batch["labels"]) + 0.5 * by_row
