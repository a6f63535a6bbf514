"""Gives a model float64: trainings in that are compared to the last digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WIDE = {torch.complex64: torch.complex128}


def in_float64(model: nn.Module) -> nn.Module:
    """Give parameters and buffers float64, and complex ones complex128, in place; return the model.

    model.to(torch.float64) would leave out the imaginary parts of complex numbers.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(_wide(tensor))
    return model


def _wide(tensor: Tensor) -> torch.dtype:
    return _WIDE.get(tensor.dtype, tensor.dtype if tensor.is_complex() else torch.float64)
