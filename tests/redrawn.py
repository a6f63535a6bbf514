"""Gives a model weights that no script would start from."""

from __future__ import annotations

import torch
from torch import nn


def redrawn(model: nn.Module) -> nn.Module:
    """Give all parameters of a model numbers that its constructor does not give."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=drawn, dtype=parameter.dtype))
    return model
