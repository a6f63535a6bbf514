"""Has a module compute in 16 bits, as far as its own code would let it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.model.layer_names import is_listed
from autopar.runtime.tensor.shards import places, tied_names


def compute_in(
    module: nn.Module, half: torch.dtype, *, buffers: Collection[str], takes_received: bool
) -> None:
    """Take floating inputs in 16 bits, and hold the named buffers so; others keep their types.

    A rotary table that is rounded to bf16 is wrong by whole radians at far positions, and a moving
    mean that is written in bf16 stands still. Parameters that learn are in fp32 for now, whatever
    type they were built in: the optimizer takes that. A stage of a pipeline that `takes_received`
    has in order what the stage before gave, in the types that it has there.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES:
            parameter.data = parameter.data.to(torch.float32)
    for place in places(module):
        names = tied_names(module, place.name)
        if not isinstance(place.tensor, nn.Parameter) and any(is_listed(n, buffers) for n in names):
            place.tensor.data = _cast(place.tensor.data, half)

    def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = args if takes_received else tuple(_cast(arg, half) for arg in args)
        return given, {name: _cast(arg, half) for name, arg in kwargs.items()}

    module.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def narrow_frozen(module: nn.Module, half: torch.dtype) -> None:
    """Hold in 16 bits the parameters that do not learn: no optimizer needs more of them."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = _cast(parameter.data, half)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
