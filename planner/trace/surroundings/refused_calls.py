"""Refuses functions of torch that no plan can share, in words of the model's author."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
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

_PACKS = (
    "the model packs sequences by their lengths, so that shapes depend on numbers",
    "shapes that follow from the shapes of the batch",
    "give the layer the padded sequences, and read each row's last state: "
    "out[torch.arange(out.shape[0]), lengths - 1]",
)
_RUNS_BACKWARD = (
    "the forward runs a backward by itself (backward()), whose gradients stay on the parameters",
    "one backward for each step, which the script runs",
    "take a gradient by torch.autograd.grad(…, create_graph=True), and add up losses",
)
_LEARNS_OUTSIDE = (
    "the forward or the loss computes with a parameter that is not the model's, and that learns",
    "parameters of modules of the model: these are built, split and optimized",
    "make it, or the module that has it, a part of the model, and let forward compute with it "
    "(return the loss, or what it needs); one that stays as it is: requires_grad_(False)",
)
_DERIVES = (
    "the forward derives a function by torch.func, which has no plain graph",
    "gradients that autograd takes",
    "torch.autograd.grad(…, create_graph=True)",
)
_REFUSED = {
    torch.Tensor.backward: _RUNS_BACKWARD,
    torch._VF._pack_padded_sequence: _PACKS,
}


_SWAPS = (
    "the forward runs a module with other weights than its own (functional_call)",
    "modules that compute with what they hold: scripts call them, or print their code",
    "write what the module computes as a function of the weights (F.linear(x, weight, bias))",
)
_TORCH = str(Path(torch.__file__).parent)


def refuse_call(func: Callable[..., Any]) -> None:
    """Raise a TraceError where a function has no part in a plan, or runs where none has."""
    refused = _REFUSED.get(func) or (_DERIVES if _is_derived() else None)
    if refused is not None:
        found, expected, fix = refused
        raise TraceError(found, where=calling_place(), expected=expected, fix=fix)


def refuse_learning_outside(args: Iterable[Any]) -> None:
    """Raise a TraceError where code computes with a parameter that learns and is not the model's.

    While a model is traced its own parameters are stand-ins.
    """
    if any(type(one) is torch.nn.Parameter and one.requires_grad for one in args):
        found, expected, fix = _LEARNS_OUTSIDE
        raise TraceError(found, where=calling_place(), expected=expected, fix=fix)


def _is_derived() -> bool:
    """Whether torch.func takes a derivative of what runs."""
    outer = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    return outer is not None and outer.key() in (kinds.Grad, kinds.Jvp)


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
