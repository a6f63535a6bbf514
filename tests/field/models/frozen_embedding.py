"""Embeddings that do not learn, below a stack that does."""

from __future__ import annotations

from torch import Tensor, nn

from tests.field.blocks import Block, Stack, token_batch, token_loss


def build_model() -> nn.Module:
    """Return a frozen table and a frozen first block, then blocks that learn."""
    model = Stack(Block, Block, Block)
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
