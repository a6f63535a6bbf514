"""Finds, while a model is traced, code that a trace would silently get wrong.

- Random numbers of Python or numpy: one draw becomes a constant.
- A plain attribute that the forward changes (a step counter): its value becomes a constant.
- Any other plain value that changes with each step, such as a global: it also becomes a constant
  (see `LeftBehind`).
- A buffer that the forward replaces instead of writing to it: the exporter forgets the new value.
- A weight that the forward writes to: each rank would change its own copy, or a gathered one.

`record` handles another silent error: the exporter loses the backward of an autograd.Function.
"""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from autopar.planner.errors import TraceError
from autopar.planner.model.outside import ABSENT, Holder, StateSnapshot, StateValue
from autopar.planner.trace.model_checks import is_library_file

_OLD_NORMS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}
_AS_BUFFER = "state that changes in training to be a buffer of the model"
_IN_BUFFER = (
    "keep it in the model: self.register_buffer('steps', torch.zeros(())) in __init__, and "
    "self.steps += 1 in forward; if the loss needs it, return it among the outputs"
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
    return tuple(map(pickle.dumps, (random.getstate(), np.random.get_state(), *held.values())))


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


@dataclass(slots=True)
class LeftBehind:
    """A step's changes of Python state; some tensors in them are replaced by stand-ins.

    The stand-ins distinguish caches from state. A step is traced twice, and the second trace begins
    with the changes of the first one (see model/outside.py). Numbers stay. A tensor computed from
    the batch or weights is replaced by a stand-in, which the second trace must not read. A tensor
    made of constants alone is a cache: its old value comes back, and the second trace may fill it
    again.
    """

    changed: list[tuple[Holder, Mapping[Any, Any]]] = field(default_factory=list)
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)  # the stand-ins, by id
    read: bool = False  # whether the next step reads a stand-in, or a cache is stale

    def put(self) -> None:
        """Put the changes in place for the next step."""
        for holder, changed in self.changed:
            holder.put(changed)

    def note_read(self, given: Any) -> None:
        """Record whether a function gets a tensor that an earlier step left."""
        if self.replaced and not self.read:
            self.read = any(id(one) in self.replaced for one in pytree.tree_leaves(given))


def left_by_call(before: StateSnapshot, after: StateSnapshot) -> tuple[StateValue, ...]:
    """Return what a call changed: values compared by content, and tensors computed in the step."""
    changed = [after.leaves[place] for place in before.changes_to(after)]
    tensors = [one for one in changed if isinstance(one.tensor, FakeTensor)]
    made = [one for one in tensors if _is_made_of_step(one.tensor)]
    return (*(one for one in changed if one.is_content), *made)


def left_behind(before: StateSnapshot, after: StateSnapshot) -> LeftBehind:
    """Return a step's changes between two snapshots; call it while the trace is running."""
    left = LeftBehind()
    for key, holder in before.holders.items():
        later = after.holders.get(key)
        if later is not None and later.owner is holder.owner:
            changed = _changed(holder.values, later.values, left.replaced)
            if changed:
                left.changed.append((holder, changed))
    left.read = any(map(_is_stale, after.caches))
    return left


def _is_stale(function: Any) -> bool:
    """Whether a function has cached a tensor that the next step must compute again.

    A cache whose keys are tensors is not stale: the next step has other tensors.
    """
    held = gc.get_referents(function)
    tables = [one for one in held if isinstance(one, dict)]
    given = pytree.tree_leaves([list(table) for table in tables])
    if any(isinstance(one, torch.Tensor) for one in given):
        return False
    made = pytree.tree_leaves([list(table.values()) for table in tables])
    fakes = (one for one in (*held, *made) if isinstance(one, FakeTensor))
    return any(map(_is_made_of_step, fakes))


def _changed(
    before: Mapping[Any, Any], after: Mapping[Any, Any], replaced: dict[int, torch.Tensor]
) -> Mapping[Any, Any]:
    """Return the changed values of a holder, in the form with which the next step begins."""
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in (*before, *after)}
    return {
        key: _as_found_later(value, old, replaced)
        for key, (old, value) in pairs.items()
        if value is not old
    }


def _as_found_later(value: Any, old: Any, replaced: dict[int, torch.Tensor]) -> Any:
    """Return the value that the next step begins with, where this step has changed the old one.

    A value without traced tensors stays. If its traced tensors are made of constants alone, the old
    value comes back. Otherwise stand-ins replace the traced tensors.
    """
    fakes = [one for one in pytree.tree_leaves(value) if isinstance(one, FakeTensor)]
    if not fakes:
        return value
    if not any(map(_is_made_of_step, fakes)):
        return old
    kept = pytree.tree_map_only(FakeTensor, _real, value)
    replaced |= {id(one): one for one in pytree.tree_leaves(kept) if isinstance(one, torch.Tensor)}
    return kept


def _real(fake: FakeTensor) -> torch.Tensor:
    """Return zeros with the sizes and dtype of a traced tensor."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in fake.shape]
    return torch.zeros(sizes, dtype=fake.dtype, device=fake.device)


def _is_made_of_step(tensor: torch.Tensor) -> bool:
    """Whether a traced tensor depends on batch or weights, is random, or is of no known origin."""
    mode = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return slot is None or any(map(_is_of_step, _ancestors(slot.proxy.node)))


def _is_of_step(node: fx.Node) -> bool:
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op == "placeholder" or is_drawn


def _ancestors(node: fx.Node) -> Iterable[fx.Node]:
    met, waiting = {node}, [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            if one not in met:
                met.add(one)
                waiting.append(one)
    return met
