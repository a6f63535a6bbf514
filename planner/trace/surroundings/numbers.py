"""Keeps the numbers of tensors that a forward makes of plain numbers, which meta would forget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def tensor_of_numbers(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return a tensor without memory whose numbers are known; None where no such one is made."""
    if func is Tensor.new_tensor:
        like, *args = args
        kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
    elif func not in _MAKERS:
        return None
    device = torch.device(kwargs.get("device") or "cpu")
    if device.type != "meta" or not args or isinstance(args[0], Tensor):
        return None
    made = torch.tensor(args[0], dtype=kwargs.get("dtype"), device="cpu").to(device)
    return made.requires_grad_() if kwargs.get("requires_grad") else made
