"""Finds tensors that modules hold as plain attributes, and memory that parameters share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.runtime.tensor.shards import has_own_ops, put_into

# a module's dicts of registered tensors and submodules
REGISTERED = ("_parameters", "_buffers", "_modules")
# prefixes of Python modules whose objects do not belong to the user's model
OF_PLANS = ("torch.distributed.", "autopar.")

# takes the attribute's name and the tensor found there; returns the replacement
Change: TypeAlias = Callable[[str, Tensor], Tensor]


def replace_plain_tensors(model: nn.Module, change: Change) -> None:
    """Replace each tensor that a module holds in a plain attribute.

    Lists, tuples, mappings, closures and plain objects are searched, and modules inside them. The
    model's own parameters and buffers stay, and so do tensors of fully_shard.
    """
    modules = dict(model.named_modules())
    registered = (vars(module)[name].values() for module in modules.values() for name in REGISTERED)
    seen = {id(one): one for found in registered for one in found if one is not None}
    walk = _ObjectWalk(change, seen | {id(module): module for module in modules.values()})
    for prefix, module in modules.items():
        for name in [one for one in module.__dict__ if one not in REGISTERED]:
            walk.attribute = f"{prefix}.{name}" if prefix else name
            walk.into_item(module.__dict__, name)


def move_plain_tensors(model: nn.Module, device: torch.device) -> None:
    """Move the tensors in plain attributes to a device; each stays the same object."""

    def moved(_: str, tensor: Tensor) -> Tensor:
        if tensor.device.type not in (device.type, "meta"):  # meta: a layer of another rank
            put_into(tensor, tensor.detach().to(device))
        return tensor

    replace_plain_tensors(model, moved)


class _ObjectWalk:
    """A walk over objects that visits each of them once."""

    def __init__(self, change: Change, seen: dict[int, Any]) -> None:
        self.attribute = ""
        self._change = change
        self._seen = seen  # the replacement of each object, by its id
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused

    def replaced(self, value: Any) -> Any:
        """Return a value, or the replacement of a tensor or tuple; other values change in place."""
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value
        self._kept.append(value)
        if isinstance(value, Tensor):
            self._seen[id(value)] = self._change(self.attribute, value)
        elif isinstance(value, tuple):
            self._seen[id(value)] = self._tuple(value)
        elif isinstance(value, (list, deque)):
            for place, item in enumerate(value):
                value[place] = self.replaced(item)
        elif isinstance(value, MutableMapping):
            self._into_items(value)
        elif isinstance(value, FunctionType) and not _is_of_plan(value):
            self._into_closure(value)
        elif isinstance(value, MethodType):
            self.replaced(value.__self__)
        elif not isinstance(value, (type, ModuleType)) and not _is_of_plan(type(value)):
            self._into_items(getattr(value, "__dict__", {}))
        return self._seen[id(value)]

    def into_item(self, items: MutableMapping[Any, Any], name: Any) -> None:
        """Replace one value of a mapping."""
        new = self.replaced(items[name])
        if new is not items[name]:
            items[name] = new

    def _into_items(self, items: MutableMapping[Any, Any]) -> None:
        for name in list(items):
            self.into_item(items, name)

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = [self.replaced(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _into_closure(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty closure cell
                continue
            new = self.replaced(value)
            if new is not value:
                cell.cell_contents = new


def _is_of_plan(one: Any) -> bool:
    return f"{one.__module__}.".startswith(OF_PLANS)


def sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: a parameter, and another tensor that shares memory with it.

    In plain PyTorch, a step changes both. In a script, each has memory of its own.
    """
    parameters = {name: one for name, one in model.named_parameters() if _lies_in_memory(one)}
    others = list(parameters.items()) + list(model.named_buffers())

    def note(name: str, tensor: Tensor) -> Tensor:
        others.append((name, tensor))
        return tensor

    replace_plain_tensors(model, note)
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, one in others:
        if _lies_in_memory(one):
            by_storage.setdefault(one.untyped_storage()._cdata, []).append((name, one))
    for found in by_storage.values():
        for name, one in found:
            if one is parameters.get(name):
                yield from ((name, other) for other, two in found if _meet(one, two))


def _lies_in_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not has_own_ops(tensor)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage share an element; True if their dtypes differ."""
    if one is other or not one.numel() or not other.numel():
        return False
    size = one.untyped_storage().nbytes()
    if one.dtype is not other.dtype:
        return True
    marked = torch.zeros(size // one.element_size(), dtype=torch.bool)
    marked.as_strided(one.shape, one.stride(), int(one.storage_offset())).fill_(True)
    return bool(marked.as_strided(other.shape, other.stride(), int(other.storage_offset())).any())
