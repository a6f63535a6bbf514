"""Buffers that a step writes whatever its rows are: a count, and the power iteration of a norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.field.blocks import Block, Stack, token_batch

WARM_UP, SMALLEST = 10, 1e-6


class Warming(Block):
    """A block whose part grows with the steps that it has seen, of bounded weights."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.up)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Add the more of the block the later it is."""
        self.count += 1
        return x + (self.count / WARM_UP).clamp(max=1) * super().forward(x)


def build_model() -> nn.Module:
    """Return a few such blocks."""
    return Stack(Warming, Warming, Warming, Warming)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return tokens of which some do not count."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return a mean over what counts that never divides by zero."""
    mask = batch["labels"] != -100
    index = batch["labels"].clamp(min=0).unsqueeze(-1)
    each = -outputs.log_softmax(-1).gather(-1, index).squeeze(-1)
    return (each * mask).sum() / (mask.sum() + SMALLEST)
