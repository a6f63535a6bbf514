"""Refuses functions of torch that no plan can share, in words of the model's author."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.utils import stateless

from autopar.planner.errors import TraceError
from autopar.planner.trace.frames import calling_place, is_library_file

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


_SWAPS = (
    "the forward runs a module with other weights than its own (functional_call)",
    "modules that compute with what they hold: scripts call them, or print their code",
    "write what the module computes as a function of the weights (F.linear(x, weight, bias))",
)
_TORCH = str(Path(torch.__file__).parent)


def refuse_call(func: Callable[..., Any]) -> None:
    """Raise a TraceError where a function has no part in a plan."""
    if func in _REFUSED:
        found, expected, fix = _REFUSED[func]
        raise TraceError(found, where=calling_place(), expected=expected, fix=fix)


@contextmanager
def own_weights_alone() -> Iterator[None]:
    """Refuse, while the body runs, that a model swaps the weights of a module of its own."""
    plain = stateless._functional_call

    @wraps(plain)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if _is_of_model(sys._getframe(1)):
            found, expected, fix = _SWAPS
            raise TraceError(found, where=calling_place(), expected=expected, fix=fix)
        return plain(*args, **kwargs)

    with patch.object(stateless, "_functional_call", asked):
        yield


def _is_of_model(frame: FrameType | None) -> bool:
    """Whether the next frame that is not torch's is the model's, and not of who traces it."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and not is_library_file(frame.f_code.co_filename)
