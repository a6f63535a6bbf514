"""One of the tiny Hugging Face families, with rows that differ from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.field.models.hugging_face import build_model, example_batch

__all__ = ["build_dataset", "build_model", "example_batch"]
ROWS = 21  # which no global batch divides


def build_dataset(family: str) -> list[dict[str, Tensor]]:
    """Return a few random rows of a family, the same whenever they are made."""
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        batch = example_batch(ROWS, family)
    return [{key: value[row] for key, value in batch.items()} for row in range(ROWS)]
