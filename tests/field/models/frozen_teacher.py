"""A student that learns from a frozen teacher, so a pipeline stage may have nothing to learn."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16


class Distilled(nn.Module):
    """Returns how far the student is from what the teacher says."""

    def __init__(self) -> None:
        super().__init__()
        steps = [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.student = nn.Sequential(*steps)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("order", torch.eye(WIDTH)[list(reversed(range(WIDTH)))])

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        said = self.student(x)
        with torch.no_grad():
            expected = self.teacher(x) @ self.order
        return functional.mse_loss(said, expected)


def build_model() -> Distilled:
    """Build the model."""
    return Distilled()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random rows."""
    return {"x": torch.randn(batch_size, WIDTH)}
