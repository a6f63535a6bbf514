"""A denoiser that draws the steps, which its layers read, and the noise, which its loss reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS, CHANNELS, WIDTH, LENGTH = 20, 8, 24, 6


class Block(nn.Module):
    """A feed-forward half, told the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.step = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        told = self.norm(x) + self.step(step)[:, None]
        out: Tensor = x + self.down(functional.silu(self.up(told)))
        return out


class Denoiser(nn.Module):
    """Predicts the noise that was added."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.steps = nn.Linear(CHANNELS, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CHANNELS)
        self.register_buffer("kept", torch.linspace(0.99, 0.01, STEPS))

    def forward(self, images: Tensor) -> Tensor:
        """Return the loss."""
        step = torch.randint(0, STEPS, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        kept = self.kept[step][:, None, None]  # type: ignore[index]
        x = self.embed(kept.sqrt() * images + (1 - kept).sqrt() * noise)
        told = self.steps(step)
        for block in self.blocks:
            x = block(x, told)
        return functional.mse_loss(self.head(x), noise)


def build_model(layers: int = 4) -> Denoiser:
    """Build the model."""
    return Denoiser(layers)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random images."""
    return {"images": torch.randn(batch_size, LENGTH, CHANNELS)}
