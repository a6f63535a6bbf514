"""Computes what torch's gaussian_nll_loss does behind its check of the variances' sign.

The check asks a tensor for its truth within the function, where nothing can answer for it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_SIGNATURE = inspect.signature(functional.gaussian_nll_loss)


def unchecked(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the loss, None where another function is called."""
    if func is not functional.gaussian_nll_loss:
        return None
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    return _gaussian(*given.args)


def _gaussian(
    mean: Tensor, target: Tensor, variance: Tensor | float, full: bool, eps: float, reduction: str
) -> Tensor:
    if isinstance(variance, (int, float)):
        variance = variance * torch.ones_like(mean)
    if variance.dim() < mean.dim():
        variance = variance.unsqueeze(-1)
    variance = variance.clone()
    with torch.no_grad():
        variance.clamp_(min=eps)
    loss = 0.5 * (torch.log(variance) + (mean - target) ** 2 / variance)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    reduced = {"mean": loss.mean, "sum": loss.sum}.get(reduction)
    return loss if reduced is None else reduced()
