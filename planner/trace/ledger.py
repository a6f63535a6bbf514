"""The tensors that a graph has so far: names, sizes, and which version of each is the newest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch

from autopar.planner.extent import Extent
from autopar.planner.ops import MODEL_DTYPE, Origin, Ref, Tensor, Value
from autopar.planner.trace.symbols import Symbols


class Ledger:
    """The tensors of a graph that is being read."""

    def __init__(self, symbols: Symbols, model_dtype: torch.dtype) -> None:
        self.symbols, self.model_dtype = symbols, model_dtype
        self.tensors: dict[str, Tensor] = {}
        self._latest: dict[str, str] = {}  # a tensor written in place → its newest version
        self._used_names: dict[str, int] = {}

    def add(
        self, name: str, val: torch.Tensor, *, storage: str, origin: Origin, requires_grad: bool
    ) -> None:
        """Add a tensor as it was traced; gradients flow through complex numbers too.

        Its name is its own: a buffer may be called `mean`, as an op is.
        """
        self._used_names.setdefault(name, 1)
        has_gradient = val.dtype.is_floating_point or val.dtype.is_complex
        self.tensors[name] = Tensor(
            name=name,
            shape=self.shape(val),
            dtype=self.dtype(val.dtype),
            storage=storage,
            origin=origin,
            requires_grad=requires_grad and has_gradient,
            counted_by=self.symbols.counter(val.shape, name),
        )

    def learn(self, written: Iterable[str]) -> None:
        """Have gradients flow through what was written, and so through all that is read of it."""
        for name in (self.tensors[one].storage for one in written):
            if self.tensors[name].origin is Origin.OP:
                self.tensors[name] = replace(self.tensors[name], requires_grad=True)

    def supersede(self, written: Iterable[str], name: str) -> None:
        """Have what was written in place read as a new tensor."""
        self._latest.update(dict.fromkeys(written, name))

    def latest_value(self, value: Value) -> Value:
        """Return a value in which every tensor is its newest version."""
        if isinstance(value, Ref):
            return Ref(self.newest(value.tensor))
        if isinstance(value, tuple):
            return tuple(map(self.latest_value, value))
        return value

    def newest(self, name: str) -> str:
        """Return the newest version of a tensor."""
        while name in self._latest:
            name = self._latest[name]
        return name

    def shape(self, val: torch.Tensor) -> tuple[Extent, ...]:
        """Return the sizes of a tensor."""
        return tuple(self.symbols.extent(size) for size in val.shape)

    def dtype(self, dtype: torch.dtype) -> str:
        """Return the name of a type, one that stands for the model's own."""
        return MODEL_DTYPE if dtype == self.model_dtype else str(dtype).removeprefix("torch.")

    def unique(self, name: str) -> str:
        """Return a name that no op or tensor has yet, and keep it."""
        stem = re.sub(r"(_\d+)+$", "", name)
        if name not in self._used_names:
            self._used_names[name] = 1
            return name
        while True:
            self._used_names[stem] = self._used_names.get(stem, 0) + 1
            candidate = f"{stem}_{self._used_names[stem]}"
            if candidate not in self._used_names:
                self._used_names[candidate] = 1
                return candidate
