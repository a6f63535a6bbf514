"""Finds, while a model is traced, code that a trace would silently get wrong.

- Random numbers of Python or numpy: one draw becomes a constant.
- A plain attribute that the forward changes (a step counter): its value becomes a constant.
- Any other plain value that changes with each step, such as a global: it also becomes a constant
  (found by left_behind.py).
- A buffer that the forward replaces instead of writing to it: the exporter forgets the new value.
- A weight that the forward writes to: each rank would change its own copy, or a gathered one.

`record` handles another silent error: the exporter loses the backward of an autograd.Function.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from autopar.planner.errors import TraceError
from autopar.planner.trace.model_checks import is_library_file

_OLD_NORMS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}
_AS_BUFFER = "state that changes in training to be a buffer of the model"
_IN_BUFFER = (
    "keep it in the model: self.register_buffer('steps', torch.zeros(())) in __init__, and "
    "self.steps += 1 in forward; return what the loss needs of it among the outputs"
)
_PLAIN = (int, float, str, bool, type(None))
_RANDOM_SOURCES = (
    (random, ("random", "randint", "uniform", "choice", "choices", "sample", "shuffle", "gauss",
              "randrange", "normalvariate", "getrandbits")),
    (np.random, ("rand", "randn", "randint", "random", "random_sample", "uniform", "normal",
                 "choice", "permutation", "shuffle", "binomial", "default_rng")),
)  # fmt: skip


@contextmanager
def no_foreign_randomness(model: nn.Module) -> Iterator[None]:
    """Raise a TraceError after the body if random numbers were drawn outside torch."""
    found: list[TraceError] = []
    before = _random_states(model)
    with ExitStack() as patches:
        for module, names in _RANDOM_SOURCES:
            for name in names:
                spy = _spy(getattr(module, name), found)
                patches.enter_context(patch.object(module, name, spy))
        yield
    if not found and before != _random_states(model):
        found.append(_baked_randomness("the model's forward"))
    if found:
        raise found[0]


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Raise a TraceError after the body if an attribute of a module has changed its value.

    The body must be one run of the model, because the exporter resets attributes afterwards. Plain
    values and tensors are compared. An attribute that was absent or None may change: it is a cache
    that is filled once, or a result that is stored for the loss.
    """
    before = _attributes(model)
    yield
    for (path, name), value in _attributes(model).items():
        old = before.get((path, name))
        if old is not None and old != value:
            raise TraceError(
                f"the forward changes the attribute {name}: the trace would keep one value",
                where=f"module {path or '(root)'}",
                expected=_AS_BUFFER,
                fix=_of_old_norm(model.get_submodule(path))
                or f"self.register_buffer({name!r}, …), changed in place",
            )


def _of_old_norm(module: nn.Module) -> str:
    """Return the fix if torch's older weight_norm or spectral_norm sets the attribute, or ""."""
    hooks = (type(hook) for hook in module._forward_pre_hooks.values())
    name = next((_OLD_NORMS[one] for one in hooks if one in _OLD_NORMS), "")
    return name and f"torch.nn.utils.parametrizations.{name}(…), which keeps no attribute"


@contextmanager
def assigned_buffers_written(module: nn.Module, path: str) -> Iterator[None]:
    """Turn `self.mean = 0.9 * self.mean + …` in the body into a write to the buffer.

    The exporter sees an assignment to a buffer of the root module only; any other is lost.
    """
    before = dict(module._buffers)
    yield
    for name, old in before.items():
        new = module._buffers.get(name)
        if old is None or new is None or new is old:
            continue
        if new.requires_grad or new.shape != old.shape:
            fault = "a value with gradient" if new.requires_grad else "a value of another shape"
            raise TraceError(
                f"the forward assigns {fault} to the buffer {name}",
                where=f"module {path or '(root)'}",
                expected="buffers that keep their shape and stay outside the gradient",
                fix=f"self.{name}.copy_(value.detach())",
            )
        module._buffers[name] = old.copy_(new)


def counts_outside(place: str, path: Path) -> TraceError:
    """Return the error for a number of the Python state that each step changes."""
    found = f"each run of the forward or the loss changes {place}: the trace would keep one value"
    return TraceError(found, where=str(path), expected=_AS_BUFFER, fix=_IN_BUFFER)


def depends_on_outside(place: str, path: Path) -> TraceError:
    """Return the error for a step whose results depend on state that an earlier step left."""
    found = f"what a step leaves in {place} changes what the next one computes"
    return TraceError(found, where=str(path), expected=_AS_BUFFER, fix=_IN_BUFFER)


def weight_written(name: str, where: str) -> TraceError:
    """Return the error for a forward that writes to a weight: each rank would write to its part."""
    return TraceError(
        f"the forward writes to the parameter {name}",
        where=where,
        expected="weights that the optimizer alone changes",
        fix="compute with a changed copy (F.linear(x, weight.clamp(…))), or make it a buffer",
    )


def _spy(function: Callable[..., Any], found: list[TraceError]) -> Callable[..., Any]:
    def spy(*args: Any, **kwargs: Any) -> Any:
        where = _caller()
        if where:  # libraries may draw random numbers of their own
            found.append(_baked_randomness(where))
        return function(*args, **kwargs)

    return spy


def _baked_randomness(where: str) -> TraceError:
    return TraceError(
        "the forward draws random numbers of Python or numpy: one draw would become a constant",
        where=where,
        expected="random numbers from torch, which stay random in the trace",
        fix="use torch.rand and its kin, or draw in the data set",
    )


def _caller() -> str:
    """Return file:line of the code that draws a random number, or "" if a library does."""
    frame: FrameType | None = sys._getframe(2)
    if frame is None or is_library_file(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _random_states(model: nn.Module) -> tuple[bytes, ...]:
    """Return the states of Python's and numpy's generators and of those that the model holds."""
    held = {
        id(value): value
        for module in model.modules()
        for value in (*vars(module).values(), *_globals(module).values())
        if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))
    }
    return (
        pickle.dumps(random.getstate()),
        pickle.dumps(np.random.get_state()),
        *(_random_state(generator) for generator in held.values()),
    )


def _random_state(generator: random.Random | np.random.Generator | np.random.RandomState) -> bytes:
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state())
    return pickle.dumps(generator.bit_generator.state)


def _globals(module: nn.Module) -> dict[str, Any]:
    """Return the globals of the file that defines a module's forward."""
    return getattr(type(module).forward, "__globals__", {})


def _attributes(model: nn.Module) -> dict[tuple[str, str], Hashable]:
    """Return the attributes of all modules that are plain values or tensors, to be compared."""
    found: dict[tuple[str, str], Hashable] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                found[path, name] = id(value)
            elif name != "training" and _is_plain(value):
                found[path, name] = repr(value) if value is not None else None
        found |= {
            (path, name): id(one) for name, one in module._parameters.items() if one is not None
        }
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
