"""Drops dims of size one wherever they are, and writes into what it has at hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, token_batch, token_loss

HEADS = 2  # one for each of two ranks


class Gate(nn.Module):
    """Weighs positions by heads, whose scores are squeezed; adds the result to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of each row."""
        keys = self.keys(x).unflatten(-1, (HEADS, -1))
        values = self.values(x).view(*x.shape[:2], HEADS, WIDTH // HEADS)
        scores = (keys * keys).mean(-1, keepdim=True).squeeze()
        mixed = (scores.softmax(dim=1).unsqueeze(-1) * values).flatten(2)
        found = torch.zeros_like(x)
        found[:, 1:] = self.out(mixed)[:, :-1]
        out: Tensor = self.dropout(found)
        out += x
        return out


class InPlace(nn.Module):
    """A few gates, over a batch whose numbers it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.gates = nn.ModuleList([Gate(), Gate()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        input_ids.data.clamp_(min=2)
        x = self.embed(input_ids)
        x = x / x.data.abs().amax(-1, keepdim=True)
        for gate in self.gates:
            x = gate(x) + x.roll(1, dims=1)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return InPlace()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
