"""Notices, while a model is traced, what a trace would silently get wrong.

- Random numbers of Python or numpy: one draw becomes a constant.
- A plain attribute that the forward changes (a step counter): its value becomes a constant.

The third silent trap, the lost backward of a custom autograd.Function, is met in `record`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import nn

from autopar.planner.errors import TraceError
from autopar.planner.trace.frames import is_library_file

_PLAIN = (int, float, str, bool, type(None))
_RANDOM_SOURCES = (
    (random, ("random", "randint", "uniform", "choice", "choices", "sample", "shuffle", "gauss",
              "randrange", "normalvariate", "getrandbits")),
    (np.random, ("rand", "randn", "randint", "random", "random_sample", "uniform", "normal",
                 "choice", "permutation", "shuffle", "binomial", "default_rng")),
)  # fmt: skip


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Raise a TraceError after the body if the model fell into a trap while it ran."""
    found: list[TraceError] = []
    before = _attributes(model)
    states = random.getstate(), str(np.random.get_state())
    with ExitStack() as patches:
        for module, names in _RANDOM_SOURCES:
            for name in names:
                spy = _spy(getattr(module, name), found)
                patches.enter_context(patch.object(module, name, spy))
        yield
    drawn = states != (random.getstate(), str(np.random.get_state()))
    if drawn and not any("random" in error.found for error in found):
        found.append(_baked_randomness(""))
    found.extend(_changed(before, _attributes(model)))
    if found:
        raise found[0]


def _spy(function: Callable[..., Any], found: list[TraceError]) -> Callable[..., Any]:
    def spy(*args: Any, **kwargs: Any) -> Any:
        where = _caller()
        if where:  # torch and its friends may draw for themselves
            found.append(_baked_randomness(where))
        return function(*args, **kwargs)

    return spy


def _baked_randomness(where: str) -> TraceError:
    return TraceError(
        "the forward draws random numbers of Python or numpy: one draw would become a constant",
        where=where or "the model's forward",
        expected="random numbers from torch, which stay random in the trace",
        fix="use torch.rand and its kin, or draw in the data set",
    )


def _caller() -> str:
    """Return file:line of the nearest caller's caller, or nothing where a library called."""
    frame: FrameType | None = sys._getframe(2)
    if frame is None or is_library_file(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _attributes(model: nn.Module) -> dict[tuple[str, str], object]:
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name != "training"
    }


def _changed(
    before: dict[tuple[str, str], object], after: dict[tuple[str, str], object]
) -> Iterator[TraceError]:
    for key, value in after.items():
        if key in before and before[key] != value:
            path, name = key
            yield TraceError(
                f"the forward changes the attribute {name} from {before[key]!r} to {value!r}: "
                "the trace would hold one value for ever",
                where=f"module {path or '(root)'}",
                expected="state that changes in training to be a buffer",
                fix=f"self.register_buffer({name!r}, …), changed in place",
            )
