"""Reads sizes, names and versions of tensors from an exported program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from autopar.planner.errors import TraceError
from autopar.planner.graph.ops import (
    MODEL_DTYPE,
    Buffer,
    Extent,
    Parameter,
    Ref,
    Tensor,
    TensorOrigin,
    Value,
)

_SAMPLE = 5040  # divisible by 1…10, so that floor divisions of a sampled batch are exact
_MAX_POWER = 3
_BATCH = sympy.Symbol("batch")


class Symbols:
    """Reads the sizes of a trace. Only batch dims are symbolic, so a symbol is the batch size.

    Exceptions are unbacked symbols: sizes that depend on data, which have no value while planning.
    For each of them, `counters` names the tensor whose entries decide it (a mask, say),
    and `bounds` has an upper limit: the number of elements of that tensor, or of the shape to which
    it is broadcast.
    """

    def __init__(self, *, fixed_batch: int | None) -> None:
        self.fixed_batch = fixed_batch
        self.bounds: dict[Any, Extent] = {}
        self.counters: dict[Any, str] = {}
        self._cache: dict[Any, Extent] = {}

    def extent(self, size: int | torch.SymInt) -> Extent:
        """Return a size as a polynomial in the batch."""
        if isinstance(size, int):
            return Extent.of(size)
        expression = size.node.expr
        if expression not in self._cache:
            self._cache[expression] = self._read(expression)
        return self._cache[expression]

    def number(self, value: torch.SymFloat) -> Extent | None:
        """Return a number that is a polynomial in the batch (`0.0 + x.shape[0]`), else None."""
        expression = value.node.expr
        batches = [1, 2, _SAMPLE] if self.fixed_batch is None else [self.fixed_batch]
        try:
            found = [float(self._replaced(expression, batch)) for batch in batches]
            extent = self._read(expression)
        except (TraceError, TypeError, ValueError, OverflowError):
            return None
        exact = [float(extent.at(batch)) for batch in batches]
        return extent if found == exact else None

    def bound(self, size: int | torch.SymInt, limit: Extent, *, counter: str) -> None:
        """Record the largest value of a size that depends on data, and the tensor that decides it.

        The first record of a symbol stays.
        """
        for symbol in _unbacked(size):
            self.bounds.setdefault(symbol, limit)
            self.counters.setdefault(symbol, counter)

    def counter(self, sizes: Sequence[int | torch.SymInt], name: str) -> str:
        """Return the tensor whose entries decide the sizes of tensor `name`; "" if they are known.

        If the sizes are not a multiple of one symbol, the result is `name` itself.
        """
        counted = [size for size in sizes if _unbacked(size)]
        if not counted:
            return ""
        if len(counted) > 1 or not isinstance(counted[0], torch.SymInt):
            return name
        expression, (symbol, *others) = counted[0].node.expr, _unbacked(counted[0])
        is_multiple = not others and (expression / symbol).is_number
        return self.counters.get(symbol, name) if is_multiple else name

    def _read(self, expression: Any) -> Extent:
        if self.fixed_batch is not None:
            return Extent.of(int(self._replaced(expression, self.fixed_batch)))
        batches = [_SAMPLE * k for k in range(1, _MAX_POWER + 2)]
        values = [int(self._replaced(expression, batch)) for batch in batches]
        return _interpolated(batches, values, expression)

    def _replaced(self, expression: Any, batch: int) -> Any:
        values = {symbol: self._symbol(symbol, batch) for symbol in expression.free_symbols}
        return expression.subs(values)

    def _symbol(self, symbol: Any, batch: int) -> int:
        if not _is_unbacked(symbol):
            return batch
        if symbol not in self.bounds:
            raise TraceError(
                f"a size depends on the values of a tensor ({symbol})",
                expected="shapes that follow from the shapes of the batch",
                fix="replace .item(), nonzero or boolean indexing with a mask",
            )
        return self.bounds[symbol].at(batch)


class RowsInNumberError(TraceError):
    """The model computes with a non-polynomial function of its number of rows."""


def check_numbers(node: fx.Node, symbols: Symbols, where: str) -> None:
    """Raise if an op computes with a root of the number of rows, a reciprocal, and so on."""
    values = (one.meta.get("val") for one in node.all_input_nodes)
    numbers = (value for value in values if isinstance(value, torch.SymFloat))
    if any(symbols.number(value) is None for value in numbers):
        raise RowsInNumberError("the model computes with its number of rows", where=where)


def depends_on_numbers(size: Any) -> bool:
    """Whether a size, or a number computed from it, depends on data."""
    return bool(_unbacked(size))


def _unbacked(size: Any) -> list[Any]:
    is_symbolic = isinstance(size, (torch.SymInt, torch.SymFloat))
    return [one for one in size.node.expr.free_symbols if _is_unbacked(one)] if is_symbolic else []


def _is_unbacked(symbol: sympy.Symbol) -> bool:
    return str(symbol).startswith("u")


def _interpolated(batches: list[int], values: list[int], expression: Any) -> Extent:
    """Return the polynomial through the samples."""
    samples = list(zip(batches, values, strict=True))
    polynomial = sympy.Poly(sympy.interpolate(samples, _BATCH), _BATCH)
    coefficients = polynomial.all_coeffs()[::-1]
    if not all(one.is_Integer for one in coefficients):
        raise TraceError(
            f"a size is no whole multiple of the batch ({expression})",
            expected="sizes such as B, 2·B or B·seq",
            fix="keep the batch as a dimension of its own",
        )
    return Extent.of(*map(int, coefficients))


class Ledger:
    """The tensors of a graph that is being read."""

    def __init__(self, symbols: Symbols, model_dtype: torch.dtype) -> None:
        self.symbols, self.model_dtype = symbols, model_dtype
        self.tensors: dict[str, Tensor] = {}
        self._latest: dict[str, str] = {}  # a tensor written in place → its newest version
        self._used_names: dict[str, int] = {}

    def add(
        self,
        name: str,
        val: torch.Tensor,
        *,
        storage: str,
        origin: TensorOrigin,
        requires_grad: bool,
    ) -> None:
        """Add a traced tensor, and reserve its name: a buffer may be called `mean`, like an op."""
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

    def require_gradients(self, written: Iterable[str]) -> None:
        """Mark the tensors that own the written memory as requiring gradients."""
        for name in (self.tensors[one].storage for one in written):
            if self.tensors[name].origin is TensorOrigin.OP:
                self.tensors[name] = replace(self.tensors[name], requires_grad=True)

    def supersede(self, written: Iterable[str], name: str) -> None:
        """Make the tensor `name` the newest version of tensors that were written in place."""
        self._latest.update(dict.fromkeys(written, name))

    def latest_value(self, value: Value) -> Value:
        """Return a value with every tensor in its newest version."""
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
        """Return the name of a dtype; MODEL_DTYPE for the model's own."""
        return MODEL_DTYPE if dtype == self.model_dtype else str(dtype).removeprefix("torch.")

    def unique(self, name: str) -> str:
        """Return a name that no op or tensor has yet, and reserve it."""
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


class ModelNames:
    """Finds the first name of each parameter and buffer; the exporter uses any name of a tied one.

    `narrowed` names the buffers that are cast to 16 bits.
    """

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
        """Return the tensor of module `site` that corresponds to `name` of the equal `template`.

        None if the module `template` has no tensor `name`.
        """
        wanted: Any = self._parameters.get(name, self._buffers.get(name))
        owner, other = self._model.get_submodule(template), self._model.get_submodule(site)
        for kind in ("named_parameters", "named_buffers"):
            for relative, tensor in getattr(owner, kind)(remove_duplicate=False):
                if tensor is wanted:
                    path, _, leaf = relative.rpartition(".")
                    return self._first[id(getattr(other.get_submodule(path), leaf))]
        return None

    def parameters(self, ledger: Ledger) -> tuple[Parameter, ...]:
        """Return every parameter once, with all its names."""
        return tuple(
            Parameter(
                name=name,
                aliases=tuple(self._aliases[name][1:]),
                shape=ledger.shape(parameter),
                dtype=ledger.dtype(parameter.dtype),
                trainable=parameter.requires_grad,
            )
            for name, parameter in self._parameters.items()
            if self._first[id(parameter)] == name
        )

    def buffers(self, ledger: Ledger, written: frozenset[str]) -> tuple[Buffer, ...]:
        """Return every buffer once; `written` are those that the forward changes."""
        non_persistent = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        return tuple(
            Buffer(
                name=name,
                shape=ledger.shape(buffer),
                dtype=ledger.dtype(buffer.dtype),
                persistent=name not in non_persistent,
                updated=name in written,
                narrowed=name in self._narrowed,
            )
            for name, buffer in self._buffers.items()
            if self._first[id(buffer)] == name
        )
