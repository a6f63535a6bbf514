"""Finds module calls that must give the same ops, so that a repeated block is traced once.

Large models repeat one block. Modules are equal if their class, plain attributes, and shapes of
parameters are equal. Two calls of equal modules give the same ops if the forms of their arguments
are equal, too. What a block reads and writes elsewhere is not seen here: `record` and `convert`
detect it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.planner.model.outside import runs_torch_alone

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
BOOKKEEPING = frozenset({"_parameters", "_buffers", "_modules"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """The properties of a tensor that can decide which ops a trace has."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorForm:
        """Return the form of a tensor."""
        return TensorForm(shape=tuple(tensor.shape), stride=tensor.stride(), dtype=tensor.dtype)

    def key(self) -> Hashable:
        """Return a comparable key (symbolic sizes by their expression)."""
        return (*map(str, self.shape), "|", *map(str, self.stride), self.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Plain:
    """A leaf that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A traced call that is replayed for equal ones (see `record`): its key, and its result's form.

    For each leaf of the result, `leaves` has the form of a new tensor, the index of an argument
    that is returned unchanged (among the arguments' leaves), or a plain value.
    """

    call: str
    spec: Any
    leaves: tuple[TensorForm | int | Plain, ...]

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        """The forms of new tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorForm))

    def result(self, inputs: Sequence[Any], fresh: Iterator[torch.Tensor]) -> Any:
        """Return a result of this structure, with tensors of `inputs` and `fresh` ones."""
        leaves = [_leaf(leaf, inputs, fresh) for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def template_of(call: str, inputs: Sequence[Any], result: Any) -> Template | None:
    """Return the template of a call; None if its result holds anything but tensors and PLAIN."""
    leaves, spec = pytree.tree_flatten(result)
    if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
        return None
    positions = {id(leaf): i for i, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)}

    def described(leaf: Any) -> TensorForm | int | Plain:
        if not isinstance(leaf, torch.Tensor):
            return Plain(leaf)
        return positions[id(leaf)] if id(leaf) in positions else TensorForm.of(leaf)

    return Template(call=call, spec=spec, leaves=tuple(map(described, leaves)))


def repeated_blocks(model: nn.Module) -> dict[str, Hashable]:
    """Return the structures of the outermost repeated modules, by path.

    They have children, or are of torch: a small module of an author's is traced each time.
    """
    # each module under the first of its names, outer modules before inner ones
    modules = dict(model.named_modules())
    structures = {path: _structure(module, {}) for path, module in modules.items()}
    counts = Counter(structures.values())
    found: dict[str, Hashable] = {}
    outermost = ""
    for path, module in modules.items():
        is_inside = bool(outermost) and path.startswith(f"{outermost}.")
        if is_inside or not path or counts[structures[path]] == 1:
            continue
        if any(True for _ in module.children()) or runs_torch_alone(module):
            found[path], outermost = structures[path], path
    return found


def call_key(structure: Hashable, leaves: Sequence[Any], spec: Any) -> Hashable | None:
    """Return a key that is equal for calls that give the same ops; None if this is unknown."""
    positions: dict[int, int] = {}
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, nn.Parameter):
            return None
        if isinstance(leaf, torch.Tensor):
            first = positions.setdefault(id(leaf), len(positions))
            parts.append((first, leaf.requires_grad, TensorForm.of(leaf).key()))
        elif isinstance(leaf, (*PLAIN, torch.SymInt)):
            parts.append((type(leaf), str(leaf)))
        else:
            return None
    return (structure, str(spec), tuple(parts)) if positions else None


def attribute_ids(module: nn.Module) -> Hashable:
    """Return the identities of a module's attributes, including its children's."""
    return tuple(
        (id(one), name, tuple(map(id, pytree.tree_leaves(value))))
        for one in module.modules()
        for name, value in vars(one).items()
        if name not in BOOKKEEPING
    )


def _leaf(
    leaf: TensorForm | int | Plain, inputs: Sequence[Any], fresh: Iterator[torch.Tensor]
) -> Any:
    if isinstance(leaf, TensorForm):
        return next(fresh)
    return inputs[leaf] if isinstance(leaf, int) else leaf.value


def _structure(module: nn.Module, positions: dict[int, int]) -> Hashable:
    """Return a key that is equal for modules that compute alike, regardless of parameters' values.

    `positions` numbers the tensors of the outermost module, so that tied ones make a difference.
    """
    attributes = {k: v for k, v in vars(module).items() if k not in BOOKKEEPING}
    tensors = [
        (name, positions.setdefault(id(tensor), len(positions)), _tensor_key(tensor))
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    ]
    children = [
        (name, child and _structure(child, positions)) for name, child in module._modules.items()
    ]
    return (type(module), _comparable(attributes), tuple(tensors), tuple(children))


def _tensor_key(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _comparable(value: Any) -> Hashable:
    """Return a comparable form of an attribute; other objects are only equal to themselves."""
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(map(_comparable, value)))
    if isinstance(value, dict):
        return (type(value), tuple((_comparable(k), _comparable(v)) for k, v in value.items()))
    if isinstance(value, set | frozenset) and not value:
        return type(value)
    return id(value)
