"""Keeps slices of constants that take all of a dim: for shorter rows they take a part of it.

`self.mask[:, :, :t, :t]` leaves no mark in a trace whose rows are as long as the mask.
"""

from __future__ import annotations

from typing import Any

import torch


def sliced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return what such slices take of a tensor that has no rows, None where there are none."""
    if func is not torch.Tensor.__getitem__ or kwargs:
        return None
    x, index = args
    asked = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, slice) for one in asked) or len(asked) > x.ndim:
        return None
    sizes = tuple(x.shape)
    if not all(isinstance(size, int) for size in sizes):
        return None
    whole = [dim for dim, one in enumerate(asked) if _takes_all(one, sizes[dim])]
    if not whole:
        return None
    rest = tuple(slice(None) if dim in whole else one for dim, one in enumerate(asked))
    result: torch.Tensor = func(x, rest)
    for dim in whole:
        result = torch.ops.aten.slice.Tensor(result, dim, 0, sizes[dim])
    return result


def _takes_all(one: slice, size: int) -> bool:
    is_plain = one.start in (None, 0) and one.step in (None, 1)
    return is_plain and type(one.stop) is int and one.stop == size > 1
