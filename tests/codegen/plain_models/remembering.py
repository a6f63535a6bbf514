"""A decoder with much beside its weights: a table, a counter, an average, a mask of its own seed.

Its weights come from a state dict, its blocks are called by keywords and draw twice, and its
optimizer asks parameters for an attribute.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Generator, Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.codegen.plain_models.rows import Row, Rows, example_of, words_row

VOCAB, LENGTH, WIDTH, HEADS = 32, 16, 32, 2


class Block(nn.Module):
    """Attention with rotary angles, of which some channels are kept out for good."""

    kept: Tensor
    mean: Tensor
    steps: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out.weight._no_weight_decay = True  # type: ignore[attr-defined]
        numbers = Generator().manual_seed(number)
        kept = (torch.rand(WIDTH, generator=numbers) < 0.9).float()
        self.register_buffer("kept", kept, persistent=False)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, *, x: Tensor, angles: Tensor) -> Tensor:
        self.steps += 1
        self.mean.mul_(0.999).add_(self.kept, alpha=0.001)
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (one.view(shape).transpose(1, 2) for one in (q, k, v))
        turned = angles.cos().to(x.dtype)
        y = F.scaled_dot_product_attention(
            q * turned, k * turned, v, dropout_p=0.1 * self.training, is_causal=True
        )
        y = self.out(y.transpose(1, 2).reshape(x.shape)) * self.kept.to(x.dtype)
        out: Tensor = x + F.dropout(y * self.mean.to(x.dtype), 0.1, self.training)
        return out


class Decoder(nn.Module):
    """Words to the logits of the words that follow."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.h = nn.ModuleList(Block(number) for number in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        steps = torch.linspace(0, 1, WIDTH // HEADS)
        self.register_buffer("inv_freq", 10000.0**-steps, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = at.float()[:, None] * self.inv_freq
        x = self.words(input_ids)
        for block in self.h:
            x = block(x=x, angles=angles)
        logits: Tensor = self.head(x)
        return logits


def build_model() -> Decoder:
    """Fill a model with the weights of another one, as one that goes on from a file."""
    made, other = Decoder(), Decoder()
    made.load_state_dict(other.state_dict())
    return made


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the words that follow."""
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def build_optimizer(model: nn.Module) -> Optimizer:
    """Decay no weight that says so."""
    every = list(model.parameters())
    spared = [one for one in every if getattr(one, "_no_weight_decay", False)]
    others = [one for one in every if not getattr(one, "_no_weight_decay", False)]
    sparing: dict[str, Any] = {"params": spared, "weight_decay": 0.0}
    return AdamW([{"params": others}, sparing], lr=1e-3, weight_decay=0.5)


def _row(numbers: Generator) -> Row:
    return words_row(numbers, vocabulary=VOCAB, length=LENGTH)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return words."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return the words."""
    return Rows(_row)
