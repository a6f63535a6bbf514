"""Gives parameters and buffers of a model other types, as trainings in 16 bits do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def wide_buffers(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the buffers of more than 16 bits by their first names, but for statistics of norms."""
    norms = (module for module in model.modules() if isinstance(module, _NormBase))
    kept = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.itemsize > 2 and id(buffer) not in kept
    }


def cast_tensors(tensors: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Give floating tensors of a model a type, in place: other modules may have them too."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
        elif tensor.is_complex():  # pairs of numbers of the type
            tensor.data = tensor.data.to(torch.promote_types(dtype, torch.complex64))
