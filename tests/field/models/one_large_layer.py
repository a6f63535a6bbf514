"""One layer holds 70 % of the parameters."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from tests.field.blocks import Block, Stack, token_batch, token_loss


def build_model() -> nn.Module:
    """Return three blocks, the second with a very wide feed-forward half."""
    return Stack(Block, partial(Block, ffn=1200), Block)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
