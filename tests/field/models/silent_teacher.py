"""A student whose teacher could learn, but is run without gradients: its weights stay as they are.

The teacher keeps statistics of its batch norms; what it says of the middle and of the end is used
by several stages, as is a table of which no gradient comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, DEPTH = 16, 4


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add what is new."""
        return x + functional.gelu(self.norm(self.map(x)))


class Taught(nn.Module):
    """Returns how far the student is from what the teacher says."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.student = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.table = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        with torch.no_grad():
            said, expected = [], x
            for layer in self.teacher:
                expected = layer(expected)
                said.append(expected)
        known = self.table(x).detach()
        distance = torch.zeros((), dtype=x.dtype, device=x.device)
        for layer, one in zip(self.student, said, strict=True):
            with torch.no_grad():
                shift = self.table(known).tanh()
            x = layer(x) + shift
            distance = distance + functional.mse_loss(x, one)
        return distance


def build_model() -> Taught:
    """Build the model."""
    return Taught()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random rows."""
    return {"x": torch.randn(batch_size, WIDTH)}
