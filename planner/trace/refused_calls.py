"""Refuses functions of torch that no plan can share, in words of the model's author."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.planner.errors import TraceError
from autopar.planner.trace.frames import calling_place

_TAKES_GRADIENT = (
    "the forward takes a gradient (torch.autograd.grad), which has no plain graph",
    "losses that are made of the model's results, and not of their gradients",
    "write the derivative out, or train this part of the loss outside autopar",
)
_PACKS = (
    "the model packs sequences by their lengths, so that shapes depend on numbers",
    "shapes that follow from the shapes of the batch",
    "give the layer the padded sequences, and read each row's last state: "
    "out[torch.arange(out.shape[0]), lengths - 1]",
)
_REFUSED = {
    torch.autograd.grad: _TAKES_GRADIENT,
    torch._VF._pack_padded_sequence: _PACKS,
}


def refuse_call(func: Callable[..., Any]) -> None:
    """Raise a TraceError where a function has no part in a plan."""
    if func in _REFUSED:
        found, expected, fix = _REFUSED[func]
        raise TraceError(found, where=calling_place(), expected=expected, fix=fix)
