"""Notes which numbers a model draws at random, and refuses to have it decide by them.

Dropping a layer where `torch.rand([]) < p` makes every step, and every rank, run other code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

AT_RANDOM = "a decision at random"  # of the error by which such a decision is told

_DRAWS = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.bernoulli, torch.rand_like, torch.randn_like,
     torch.normal, Tensor.uniform_, Tensor.bernoulli_, Tensor.normal_, Tensor.random_}
)  # fmt: skip
_MARK = "_autopar_is_drawn"


def note_drawn(func: Callable[..., Any], args: Iterable[Any], result: Any) -> None:
    """Mark a result that is one number, if it was drawn or computed from one that was."""
    if not isinstance(result, Tensor) or any(type(n) is not int or n != 1 for n in result.shape):
        return
    if func in _DRAWS or any(_is_drawn(one) for one in args):
        setattr(result, _MARK, True)


def refuse_drawn(asked: Tensor) -> None:
    """Raise an error where a number that was drawn is asked for its truth."""
    if _is_drawn(asked):
        raise RuntimeError(AT_RANDOM)


def _is_drawn(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, _MARK, False)
