"""Rows for the model files beside: as many as a few steps need, each made from its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

ROWS = 32
Row = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rows(Dataset[Row]):
    """Rows that a function makes of a generator seeded with the number of the row."""

    make: Callable[[Generator], Row]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Row:
        return self.make(Generator().manual_seed(index))


def example_of(make: Callable[[Generator], Row], batch_size: int) -> dict[str, Tensor]:
    """Return the first rows as one batch."""
    rows = [make(Generator().manual_seed(index)) for index in range(batch_size)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def words_row(numbers: Generator, *, vocabulary: int, length: int) -> Row:
    """Return a row of words that has a padded end of a length of its own, which does not count."""
    ids = torch.randint(2, vocabulary, (length,), generator=numbers)
    end = int(torch.randint(length // 2, length, (), generator=numbers))
    labels = ids.clone()
    labels[end:] = -100
    return {"input_ids": ids, "labels": labels}
