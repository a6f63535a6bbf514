"""Models that spend their time in recurrent layers, or in transposed convolutions.

Kinds: lstm, gru (taggers of words), deconv (a decoder of images, as of a GAN or an autoencoder).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

WORDS, TAGS, WIDTH, HIDDEN, LENGTH = 1000, 32, 128, 256, 32
LATENT, CHANNELS, SIDE = 64, (128, 64, 32), 32


class Tagger(nn.Module):
    """Words to the logits of their tags, by two recurrent layers."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, HIDDEN, num_layers=2, batch_first=True)
        self.out = nn.Linear(HIDDEN, TAGS)

    def forward(self, given: Tensor) -> Tensor:
        """Map [batch, seq] to [batch, tags, seq]."""
        tags: Tensor = self.out(self.layers(self.words(given))[0])
        return tags.transpose(1, 2)


class Decoder(nn.Module):
    """Latent vectors to images: each transposed convolution doubles the sides."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(LATENT, CHANNELS[0] * (SIDE // 8) ** 2)
        first, second, third = CHANNELS
        self.up = nn.Sequential(
            nn.ConvTranspose2d(first, second, 4, stride=2, padding=1),
            nn.BatchNorm2d(second),
            nn.ReLU(),
            nn.ConvTranspose2d(second, third, 4, stride=2, padding=1),
            nn.BatchNorm2d(third),
            nn.ReLU(),
            nn.ConvTranspose2d(third, 3, 4, stride=2, padding=1),
        )

    def forward(self, given: Tensor) -> Tensor:
        """Map [batch, latent] to [batch, 3, side, side]."""
        images: Tensor = self.up(
            self.start(given).unflatten(1, (CHANNELS[0], SIDE // 8, SIDE // 8))
        )
        return images


def build_model(kind: str) -> nn.Module:
    """Return a model of a kind."""
    return Decoder() if kind == "deconv" else Tagger({"lstm": nn.LSTM, "gru": nn.GRU}[kind])


def example_batch(batch_size: int, kind: str) -> dict[str, Tensor]:
    """Return noise with random targets."""
    if kind == "deconv":
        images = torch.randn(batch_size, 3, SIDE, SIDE)
        return {"given": torch.randn(batch_size, LATENT), "targets": images}
    words = torch.randint(WORDS, (batch_size, LENGTH))
    return {"given": words, "targets": torch.randint(TAGS, (batch_size, LENGTH))}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the tags, or the mean square error of the pixels."""
    targets = batch["targets"]
    return (mse_loss if targets.is_floating_point() else cross_entropy)(outputs, targets)
