"""Gives the losses of single rows their shape, which torch has wrong on the meta device.

Where the number of rows is a symbol, `cross_entropy(…, reduction="none")` of [rows, classes] has
no dims there; of [rows, classes, 1] it has the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

_LOSSES = frozenset({functional.cross_entropy, functional.nll_loss})


def loss_of_each_row(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the losses of all rows, None where another function or reduction is called."""
    if func not in _LOSSES or kwargs.get("reduction") != "none" or len(args) < 2:
        return None
    scores, classes, *rest = args
    if not scores.is_meta or scores.dim() != 2 or classes.dim() != 1:
        return None
    losses: Tensor = func(scores.unsqueeze(2), classes.unsqueeze(1), *rest, **kwargs)
    return losses.squeeze(1)
