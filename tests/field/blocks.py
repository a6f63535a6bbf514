"""What the awkward models are built from: a plain block, tokens, a loss per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, HEADS, LENGTH = 50, 24, 4, 7


class Block(nn.Module):
    """Causal attention and a feed-forward half, each normalised before and added."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, ffn: int = 4 * WIDTH) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)

    def heads_of(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to [batch, heads, seq, head_dim]."""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        normed = self.norm_1(x)
        q, k, v = (self.heads_of(one(normed)) for one in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return out


class Stack(nn.Module):
    """Tokens embedded, some blocks one after another, scores of the next tokens."""

    def __init__(self, *blocks: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def token_batch(batch_size: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Return random tokens, and those that follow them, of which some do not count."""
    tokens = torch.randint(VOCAB, (batch_size, length + 1))
    labels = tokens[:, 1:].clone()
    labels[::3, -2:] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy per token that counts."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
