"""Records and restores the Python state that running a model may change.

A trace records a plain value as a constant. If the model counts its calls (in a global, a class
attribute, a closure, a default argument, a module that a loss calls), the count would keep its
first value in code that autopar prints, and grow with each microbatch in code of the model.

The state is the globals of the model's files, the attributes of its modules, the environment, and
all values inside these: in containers, iterators, functions with closures and defaults, classes of
these files and their instances, modules. Objects of libraries are not searched. Caches of functions
(`lru_cache`) are cleared.
"""

from __future__ import annotations

import gc
import itertools
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensor

from autopar.planner.model.functions import has_hooks, loaded_sources

PLAIN = (int, float, complex, str, bytes, type(None), itertools.count)
# compared by repr: nan != nan, and itertools.count compares by identity
_COMPARED_BY_REPR = (float, complex, itertools.count)
_LONGEST = 1000  # entries: a longer container holds data
_LARGEST_BYTES = 2**20  # of an array: a larger one holds data
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_MODULE_COLLECTIONS = frozenset(  # every module has these; the dicts of hooks are mostly empty
    key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set))
)
_PYTHON_ATTRIBUTES = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__builtins__"}
)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_ITERATOR_MODULES = ("builtins", "itertools")  # modules whose iterators may hold other objects
_CACHED = type(cache(int))
_OF_TORCH = "torch.nn.modules."
ABSENT = object()


class StateValue(NamedTuple):
    """A value of the Python state, in a form that can be compared (`comparable`).

    `is_content`: the form is the content, and a change means that a step left state for the
    next one. Otherwise the value is a tensor, compared by its identity, or a cache, by its size.
    """

    comparable: Any
    is_content: bool
    tensor: Any = None  # kept alive, so that its id is not reused


@dataclass(frozen=True, slots=True)
class Holder:
    """An object with values under keys (a dict, a list, an instance), and its recorded values."""

    owner: Any
    values: Mapping[Any, Any]

    def put_back(self) -> None:
        """Restore the owner's recorded values; unchanged ones are not touched."""
        now = _values_of(self.owner)
        keys = (*now, *(key for key in self.values if key not in now))
        self.put({key: self.values.get(key, ABSENT) for key in keys})

    def put(self, changed: Mapping[Any, Any]) -> None:
        """Set the owner's values under some keys; ABSENT removes a key."""
        owner, now = self.owner, _values_of(self.owner)
        if all(now.get(key, ABSENT) is value for key, value in changed.items()):
            return
        if isinstance(owner, (list, deque, set)):
            held = [value for value in {**now, **changed}.values() if value is not ABSENT]
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(held)
            return
        for key, value in changed.items():
            if now.get(key, ABSENT) is not value:
                _set(owner, key, value)


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Recorded state: values by place (`step of model.py`), and the objects that hold them."""

    leaves: dict[str, StateValue] = field(default_factory=dict)
    holders: dict[int, Holder] = field(default_factory=dict)
    caches: list[Any] = field(default_factory=list)  # functions with a cache of results

    def put_back(self) -> None:
        """Restore all values, and clear caches."""
        for holder in self.holders.values():
            holder.put_back()
        for function in self.caches:
            function.cache_clear()

    def changes_to(self, after: StateSnapshot) -> Mapping[str, bool]:
        """Return the places whose values changed, each with whether its content is compared."""
        return {
            place: leaf.is_content
            for place, leaf in after.leaves.items()
            if place not in self.leaves or self.leaves[place].comparable != leaf.comparable
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StateScope:
    """Where state is looked for: in a model's files, and in its modules (by path)."""

    files: tuple[ModuleType, ...]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    def around(self, path: str) -> StateScope:
        """Return the scope for a call of a module: all files, and the modules in and around it."""
        names = path.split(".")
        above = ("", *(".".join(names[:depth]) for depth in range(1, len(names))))
        outer = {name: self.modules[name] for name in above if name in self.modules}
        return replace(self, modules=outer | dict(self.modules[path].named_modules(prefix=path)))

    def snapshot(self) -> StateSnapshot:
        """Record the current state."""
        walk = _StateWalk({file.__name__ for file in self.files})
        for name, value in os.environ.items():
            walk.found.leaves[f"os.environ[{name!r}]"] = StateValue(value, is_content=True)
        with torch._C.DisableTorchFunction():  # otherwise a trace would record these reads as ops
            for file in self.files:
                walk.look_into(vars(file), Path(str(file.__file__)).name)
            for path, module in self.modules.items():
                walk.look_into(module, f"module {path or '(root)'}")
        return walk.found

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the state after the body."""
        before = self.snapshot()
        try:
            yield
        finally:
            before.put_back()


def state_scope(path: Path, model: nn.Module | None = None) -> StateScope:
    """Return the scope for a model that a file builds."""
    modules = {} if model is None else dict(model.named_modules())
    classes = {kind for module in modules.values() for kind in type(module).__mro__}
    return StateScope(files=tuple(loaded_sources(path, classes)), modules=modules)


def runs_torch_alone(module: nn.Module) -> bool:
    """Whether a call of a module runs no code but torch's, which changes no globals of files."""
    return all(
        type(one).__module__.startswith(_OF_TORCH)
        and str(type(one).forward.__module__).startswith(_OF_TORCH)
        and not has_hooks(one)
        and not any(map(callable, vars(one).values()))  # an activation, a forward of its own
        for one in module.modules()
    )


class _StateWalk:
    """A walk over values and what they hold; it visits each object once."""

    def __init__(self, files: Set[str]) -> None:
        self.files = files
        self.found = StateSnapshot()
        self.met: set[int] = set()

    def look_into(self, owner: Any, name: str) -> None:
        """Record the values of a module, or of a file's globals."""
        self.met.add(id(owner))
        values = _values_of(owner)
        self.found.holders[id(owner)] = Holder(owner, values)
        for key, value in values.items():
            if key in _MODULE_COLLECTIONS and not value:  # a library may add hooks when it runs
                if isinstance(value, dict):
                    self.found.holders[id(value)] = Holder(value, {})
            elif key not in _REGISTRIES and not key.startswith("__"):
                self.look(f"{key} of {name}", value)

    def look(self, place: str, value: Any) -> None:
        """Record a value, or walk into it."""
        if isinstance(value, PLAIN):
            comparable = (
                repr(value) if isinstance(value, _COMPARED_BY_REPR) else (type(value), value)
            )
            self.found.leaves[place] = StateValue(comparable, is_content=True)
        elif isinstance(value, torch.Tensor):
            self._look_at_tensor(place, value)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _LARGEST_BYTES:
                self.found.leaves[place] = StateValue(value.tobytes(), is_content=True)
        elif id(value) not in self.met:
            self.met.add(id(value))
            if isinstance(value, Iterator):
                self.found.leaves[place] = StateValue(_progress(value), is_content=True)
            if isinstance(value, _CACHED) and value.__module__ in self.files:
                self.found.caches.append(value)
                self.found.leaves[place] = StateValue(value.cache_info().currsize, is_content=False)
            for name, inner in self._inside(value):
                self.look(_joined(place, name), inner)

    def _look_at_tensor(self, place: str, tensor: torch.Tensor) -> None:
        """Record a tensor's identity, and its version counter if it has values."""
        self.found.leaves[place] = StateValue(id(tensor), is_content=False, tensor=tensor)
        if not isinstance(tensor, FakeTensor) and not tensor.is_inference():
            written = (id(tensor), tensor._version)
            self.found.leaves[_joined(place, "[:]")] = StateValue(
                written, is_content=True, tensor=tensor
            )

    def _inside(self, value: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, _CACHED):
            return (("", value.__wrapped__),)
        if isinstance(value, Iterator) and type(value).__module__ in _ITERATOR_MODULES:
            inner = () if isinstance(value, GeneratorType) else gc.get_referents(value)
            return ((f"[{n}]", one) for n, one in enumerate(inner))
        if isinstance(value, MethodType):
            return (("", value.__self__), ("", value.__func__))
        if isinstance(value, partial):
            return (("", value.func), (".args", value.args), (".keywords", value.keywords))
        if isinstance(value, _CONTAINERS) and len(value) > _LONGEST:
            return (("", len(value)),)  # too long to be state
        if isinstance(value, (*_CONTAINERS, CellType)) or self._is_own(value):
            return self._of_holder(value)
        return ()

    def _is_own(self, value: Any) -> bool:
        kind = value if isinstance(value, type) else type(value)
        return kind.__module__ in self.files or isinstance(value, nn.Module)

    def _of_function(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        if function.__module__ not in self.files:
            return
        if "__wrapped__" in function.__dict__:  # recorded under the wrapper's name
            yield "", function.__dict__["__wrapped__"]
        yield ".__defaults__", function.__defaults__
        yield ".__kwdefaults__", function.__kwdefaults__
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            yield f".{name}", cell
        yield from self._of_holder(function)

    def _of_holder(self, value: Any) -> Iterator[tuple[str, Any]]:
        values = _values_of(value)
        if not isinstance(value, (tuple, frozenset)):
            self.found.holders[id(value)] = Holder(value, values)
        for key, inner in values.items():
            if isinstance(value, CellType):
                yield "", inner
            elif isinstance(value, _CONTAINERS):
                yield f"[{key!r}]", inner
            elif isinstance(value, nn.Module) and key in _REGISTRIES:
                yield from ((f".{name[2:-2]}", one) for name, one in self._of_holder(inner))
            elif key not in _PYTHON_ATTRIBUTES:
                yield f".{key}", inner


def _values_of(owner: Any) -> Mapping[Any, Any]:
    """Return the values that something holds, by key, index or attribute."""
    if isinstance(owner, dict):
        return dict(owner)
    if isinstance(owner, (set, frozenset)):
        return {repr(one): one for one in owner}
    if isinstance(owner, _CONTAINERS):
        return dict(enumerate(owner))
    if isinstance(owner, CellType):
        try:
            return {"": owner.cell_contents}
        except ValueError:  # a name without a value yet
            return {}
    kind = owner if isinstance(owner, type) else type(owner)
    own = {name: getattr(owner, name) for name in _slots(kind) if hasattr(owner, name)}
    return {**own, **getattr(owner, "__dict__", {})}


def _slots(kind: type) -> list[str]:
    # not in a cache, which would keep alive a model's classes and everything they refer to
    return [name for one in kind.__mro__ for name in vars(one).get("__slots__", ())]


def _progress(iterator: Iterator[Any]) -> Any:
    """Return an iterator's position, if Python tells it.

    It is the number of items that are left, or for a generator its instruction and its plain local
    variables.
    """
    if not isinstance(iterator, GeneratorType):
        return operator.length_hint(iterator, -1)
    frame = iterator.gi_frame
    variables = {} if frame is None else frame.f_locals
    plain = tuple((name, repr(one)) for name, one in variables.items() if isinstance(one, PLAIN))
    return frame is not None and frame.f_lasti, plain


def _set(owner: Any, key: Any, value: Any) -> None:
    """Set or remove a value under a key."""
    if isinstance(owner, dict):
        if value is ABSENT:
            del owner[key]
        else:
            owner[key] = value
    elif isinstance(owner, CellType):
        owner.cell_contents = value
    elif isinstance(owner, nn.Module):  # nn.Module's __setattr__ uses registries
        _set(owner.__dict__, key, value)
    elif value is ABSENT:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


def _joined(place: str, inner: str) -> str:
    """Return the place of a value inside another, such as `CFG.step of model.py`."""
    name, of, owner = place.partition(" of ")
    return f"{name}{inner}{of}{owner}"
