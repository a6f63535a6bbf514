"""A generator and a discriminator that learn against each other in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of

NOISE, HIDDEN, PIXELS = 8, 128, 16


class Reversed(torch.autograd.Function):
    """Hands numbers on as they are, and gradients with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the numbers."""
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient, turned round."""
        del ctx
        return -gradients[0]


class Gan(nn.Module):
    """What lowers the discriminator's loss raises the generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
            nn.Linear(HIDDEN, PIXELS), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, HIDDEN), nn.LeakyReLU(0.2), nn.Linear(HIDDEN, HIDDEN),
            nn.LeakyReLU(0.2), nn.Linear(HIDDEN, 1),
        )  # fmt: skip

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        """Return the loss of telling real images from those that noise was made to."""
        fake = Reversed.apply(self.generator(noise))  # type: ignore[no-untyped-call]
        known, made = self.discriminator(real), self.discriminator(fake)
        is_real = functional.binary_cross_entropy_with_logits(known, torch.ones_like(known))
        is_made = functional.binary_cross_entropy_with_logits(made, torch.zeros_like(made))
        return is_real + is_made


def build_model() -> nn.Module:
    """Return the model."""
    return Gan()


def _row(numbers: Generator) -> Row:
    return {
        "real": torch.rand(PIXELS, generator=numbers),
        "noise": torch.randn(NOISE, generator=numbers),
    }


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images and noise."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return images and noise."""
    return Rows(_row)
