"""Runs constructors of models on the meta device, where tensors have sizes and no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FILLS = frozenset({Tensor.normal_, Tensor.exponential_, Tensor.clamp_, Tensor.erfinv_})


@contextmanager
def without_memory() -> Iterator[None]:
    """Have a constructor make tensors that take no memory."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Leaves out what fills a tensor without memory with random numbers.

    Torch finds the type and the sizes of these in Python, a millisecond for each, which is most of
    the time that a large model takes to build. What it refuses still comes to it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Return the tensor that was to be filled, or what the function returns."""
        del types
        if func in _FILLS:
            filled = args[0]
            is_written_to = filled.requires_grad and torch.is_grad_enabled()
            if filled.is_meta and filled.is_floating_point() and not is_written_to:
                return filled
        return func(*args, **(kwargs or {}))
