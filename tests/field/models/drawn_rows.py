"""A language model whose dataset draws a row's window, its hidden words and its order at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

WORDS, WIDTH, LENGTH = 40, 24, 6


class Block(nn.Module):
    """A feed-forward half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same shape."""
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class WordModel(nn.Module):
    """Predicts the words that follow."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of every place."""
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Windows(Dataset[dict[str, object]]):
    """Windows of one long text, wherever a draw says: the number of a row says nothing."""

    def __init__(self) -> None:
        self.text = list(range(WORDS)) * 20
        random.shuffle(self.text)

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, object]:
        first = int(torch.randint(0, len(self.text) - LENGTH, ()))
        words: Sequence[int] = self.text[first : first + LENGTH + 1]
        is_hidden = np.random.random(LENGTH) < 0.2
        hidden = np.where(is_hidden, random.randrange(WORDS), words[:-1])
        return {"words": hidden, "next": words[1:]}


def build_model(layers: int = 4) -> WordModel:
    """Build the model."""
    return WordModel(layers)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random words."""
    shape = (batch_size, LENGTH)
    return {"words": torch.randint(0, WORDS, shape), "next": torch.randint(0, WORDS, shape)}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over all places."""
    return functional.cross_entropy(outputs.flatten(0, 1), batch["next"].flatten())


def build_dataset() -> Windows:
    """Return the windows."""
    return Windows()
