"""A frozen model with adapters of low rank (LoRA), on rows of which some places do not count."""

from __future__ import annotations

from torch import Generator, Tensor

from tests.codegen.plain_models.rows import Row, Rows, example_of, words_row
from tests.field.blocks import LENGTH, VOCAB
from tests.field.models.adapters import build_model, loss

__all__ = ["build_dataset", "build_model", "example_batch", "loss"]


def _row(numbers: Generator) -> Row:
    return words_row(numbers, vocabulary=VOCAB, length=LENGTH)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return tokens."""
    return example_of(_row, batch_size)


def build_dataset() -> Rows:
    """Return the tokens."""
    return Rows(_row)
