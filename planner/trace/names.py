"""The names of a model's parameters and buffers: tied ones are one, under their first name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from autopar.planner.extent import Extent
from autopar.planner.ops import Buffer, Parameter

ShapeOf = Callable[[torch.Tensor], tuple[Extent, ...]]
TypeOf = Callable[[torch.dtype], str]


class ModelNames:
    """Looks up canonical names; the exporter may report any alias of a tied weight."""

    def __init__(self, model: nn.Module, narrowed: Collection[str] = ()) -> None:
        self._model, self._narrowed = model, narrowed
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._first: dict[int, str] = {}
        self._aliases: dict[str, list[str]] = {}
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            first = self._first.setdefault(id(tensor), name)
            self._aliases.setdefault(first, []).append(name)

    def parameter(self, name: str) -> str:
        """Return the first name of a parameter."""
        return self._first[id(self._parameters[name])]

    def buffer(self, name: str) -> str:
        """Return the first name of a buffer."""
        return self._first[id(self._buffers[name])]

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter is to be trained."""
        return self._parameters[name].requires_grad

    def corresponding(self, name: str, template: str, site: str) -> str | None:
        """Return the tensor that is to module `site` what `name` is to its equal `template`."""
        wanted: Any = self._parameters.get(name, self._buffers.get(name))
        owner, other = self._model.get_submodule(template), self._model.get_submodule(site)
        for kind in ("named_parameters", "named_buffers"):
            for relative, tensor in getattr(owner, kind)(remove_duplicate=False):
                if tensor is wanted:
                    path, _, leaf = relative.rpartition(".")
                    return self._first[id(getattr(other.get_submodule(path), leaf))]
        return None

    def parameters(self, shape: ShapeOf, dtype: TypeOf) -> tuple[Parameter, ...]:
        """Return every parameter once, with all its names."""
        return tuple(
            Parameter(
                name=name,
                aliases=tuple(self._aliases[name][1:]),
                shape=shape(parameter),
                dtype=dtype(parameter.dtype),
                trainable=parameter.requires_grad,
            )
            for name, parameter in self._parameters.items()
            if self._first[id(parameter)] == name
        )

    def buffers(self, shape: ShapeOf, dtype: TypeOf, written: frozenset[str]) -> tuple[Buffer, ...]:
        """Return every buffer once; `written` names those that the forward changes."""
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        return tuple(
            Buffer(
                name=name,
                shape=shape(buffer),
                dtype=dtype(buffer.dtype),
                persistent=name not in passing,
                updated=name in written,
                narrowed=name in self._narrowed,
            )
            for name, buffer in self._buffers.items()
            if self._first[id(buffer)] == name
        )
