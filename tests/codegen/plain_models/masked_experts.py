"""A mixture of experts that goes through its experts, each on the tokens that a mask picks."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of, words_row
from tests.field.blocks import HEADS, VOCAB, WIDTH, Block

EXPERTS, CHOSEN, LENGTH = 4, 2, 8


class Expert(nn.Module):
    """A feed-forward half."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens to others."""
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out


class Experts(nn.Module):
    """Gives each token to the experts that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Add to each token what its experts make of it."""
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places, slots = torch.where(chosen == number)
            out.index_add_(0, places, expert(tokens[places]) * weights[places, slots, None])
        return x + out.view_as(x)


class Model(nn.Module):
    """Attention and experts in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = nn.ModuleList(Block(WIDTH, HEADS, 2 * WIDTH) for _ in range(2))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.embed(input_ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = experts(attention(x))
        scores = self.head(x)[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


def build_model() -> nn.Module:
    """Return the model."""
    return Model()


def _row(numbers: Generator) -> Row:
    return words_row(numbers, vocabulary=VOCAB, length=LENGTH)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return tokens."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return the tokens."""
    return Rows(_row)
