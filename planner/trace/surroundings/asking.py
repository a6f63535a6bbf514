"""Answers a model that asks a tensor for its number, which has none while it is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.planner.trace.surroundings.checks import passing_answer
from autopar.planner.trace.surroundings.drawn import refuse_drawn
from autopar.planner.trace.surroundings.known import known_number

_ASKING: Mapping[Callable[..., Any], Callable[[Any], Any]] = MappingProxyType(
    {
        Tensor.__bool__: bool,
        Tensor.__float__: float,
        Tensor.__index__: operator.index,
        Tensor.__int__: int,
        Tensor.item: lambda number: number,
    }
)


def answered(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return the number that a call asks for; None where it asks for none, or nobody knows."""
    if func not in _ASKING:
        return None
    asked = args[0]
    number = known_number(asked)
    if number is None and (func is Tensor.__bool__ or asked.dtype is torch.bool):
        number = passing_answer(asked)
    if number is None:
        refuse_drawn(asked)
        return None
    return _ASKING[func](number)
