"""One of the tiny Hugging Face families, as the model file of a user has it."""

from __future__ import annotations

from torch import Tensor, nn

from tests.field.families import family_named


def build_model(family: str) -> nn.Module:
    """Return the model of a family, which returns its loss."""
    return family_named(family).build_model()


def example_batch(batch_size: int, family: str) -> dict[str, Tensor]:
    """Return a random batch of a family."""
    return family_named(family).example_batch(batch_size)
