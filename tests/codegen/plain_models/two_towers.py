"""Two towers whose vectors are compared with those of all other rows (CLIP)."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of

WORDS, LENGTH, PIXELS, WIDTH = 30, 6, 12, 16


class Tower(nn.Module):
    """Maps what it is given to a vector of length one."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = first, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows to vectors."""
        x = self.first(x)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return functional.normalize(x, dim=-1)


class TwoTowers(nn.Module):
    """Images and texts in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Tower(nn.Linear(PIXELS, WIDTH))
        self.text = Tower(nn.EmbeddingBag(WORDS, WIDTH))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pixels: Tensor, words: Tensor) -> Tensor:
        """Return how far images and texts are from being each other's best match."""
        scores = self.scale.exp() * self.image(pixels) @ self.text(words).t()
        places = torch.arange(scores.shape[0], device=scores.device)
        return (
            functional.cross_entropy(scores, places) + functional.cross_entropy(scores.t(), places)
        ) / 2


def build_model() -> nn.Module:
    """Return the model."""
    return TwoTowers()


def _row(numbers: Generator) -> Row:
    return {
        "pixels": torch.randn(PIXELS, generator=numbers),
        "words": torch.randint(WORDS, (LENGTH,), generator=numbers),
    }


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return images and their texts."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return images and their texts."""
    return Rows(_row)
