"""A bidirectional LSTM that gives each word of a sentence its tag."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from tests.codegen.plain_models.rows import Row, Rows, example_of

WORDS, TAGS, LENGTH = 40, 6, 6


class Tagger(nn.Module):
    """Embeds words, reads them both ways in two layers, and scores tags."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width, 256), nn.Tanh(), nn.Linear(256, TAGS))

    def forward(self, words: Tensor) -> Tensor:
        """Map words to the scores of their tags."""
        states, _ = self.lstm(self.embed(words))
        out: Tensor = self.head(states)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Tagger()


def _row(numbers: Generator) -> Row:
    end = int(torch.randint(LENGTH // 2, LENGTH, (), generator=numbers))
    words = torch.randint(1, WORDS, (LENGTH,), generator=numbers)
    tags = torch.randint(TAGS, (LENGTH,), generator=numbers)
    words[end:], tags[end:] = 0, -100
    return {"words": words, "tags": tags}


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return padded sentences and their tags."""
    return example_of(_row, batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over words."""
    return functional.cross_entropy(outputs.transpose(1, 2), batch["tags"], ignore_index=-100)


def build_dataset() -> Rows:
    """Return the sentences."""
    return Rows(_row)
