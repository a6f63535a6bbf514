"""Finds tensors whose entries were selected by a mask: `x[mask]`, `torch.where(mask)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.planner.errors import TraceError
from autopar.planner.graph.ops import Tensor as Traced
from autopar.planner.graph.ops import Value, refs
from autopar.planner.rules.rule import OpKind
from autopar.planner.rules.table import rule_of
from autopar.planner.trace.symbols import depends_on_numbers

_PICKING = frozenset({torch.masked_select, Tensor.masked_select})
_COUNTING = frozenset(
    f"aten.{name}.default" for name in ("nonzero", "nonzero_numpy", "argwhere", "where")
)
_NUMBERS = (
    OpKind.ADDITION, OpKind.SUBTRACTION, OpKind.NEGATION, OpKind.MULTIPLICATION, OpKind.DIVISION,
    OpKind.POWER, OpKind.FILL, OpKind.RANGE,
)  # fmt: skip


def picked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Compute `masked_select` as `x[mask]`: then all selections by one mask have one symbolic size.

    Return None for other functions, and for a mask that is broadcast.
    """
    if func not in _PICKING:
        return None
    whole, mask = (*args, *kwargs.values())
    if whole.shape != mask.shape:  # x[mask] does not broadcast
        return None
    return Tensor.__getitem__(whole, mask)


def mask_of(
    target: str, arguments: Mapping[str, Value], tensors: Mapping[str, Traced]
) -> str | None:
    """Return the mask whose true entries an op selects or finds, or None."""
    if target in _COUNTING:
        return next(refs(tuple(arguments.values())))
    if target == "aten.masked_select.default":  # the mask may be broadcast
        return next(refs(arguments["mask"]))
    if target != "aten.index.Tensor":
        return None
    (*indices,) = refs(arguments["indices"])
    is_mask = len(indices) == 1 and tensors[indices[0]].dtype == "bool"
    return indices[0] if is_mask else None


def refuse_counted(node: fx.Node, target: str, where: str) -> None:
    """Raise if the model computes with the number of selected entries, which no plan knows."""
    if rule_of(target).kind not in _NUMBERS:
        return
    for argument in node.args:
        value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
        if depends_on_numbers(value):
            raise TraceError(
                "the model computes with the number of entries that a mask picks",
                where=where,
                expected="numbers that follow from the shapes of the batch, or tensors",
                fix="write mask.sum() for it",
            )
