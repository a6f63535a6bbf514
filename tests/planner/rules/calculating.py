"""A model of one calculation on a batch x [batch, 3, 6] and a weight [6, 6]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.planner.model.model_file import ModelFile

Calculate = Callable[[Tensor, Tensor], Tensor]


class Calculating(nn.Module):
    """Calculates with its input and its weight."""

    def __init__(self, calculate: Calculate) -> None:
        super().__init__()
        self.calculate = calculate
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Return what is calculated."""
        return self.calculate(x, self.weight)


def file_of(calculate: Calculate) -> ModelFile:
    """Return the model file of a calculation, the sum of which is the loss."""
    return ModelFile(
        path=Path("calculating.py"),
        factory="build_model",
        arguments=(),
        build_model=lambda: Calculating(calculate),
        example_batch=lambda batch_size: {"x": torch.randn(batch_size, 3, 6)},
        loss=lambda outputs, batch: outputs.sum() + 0 * batch["x"].sum(),
        build_dataset=None,
        build_optimizer=None,
        build_scheduler=None,
    )
