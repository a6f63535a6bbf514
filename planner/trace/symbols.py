"""Turns torch's symbolic sizes into extents in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from autopar.planner.errors import TraceError
from autopar.planner.extent import Extent

_SAMPLE = 5040  # divisible by 1…10, so that floor divisions of a sampled batch are exact
_MAX_POWER = 3


class Symbols:
    """Reads sizes of one trace: every symbol is the batch, because only batch dims are symbolic.

    Sizes that depend on data (unbacked symbols) have no value at planning time; `bounds` holds what
    is known of them: no more elements than the tensor they were counted in, and `counters` by what
    they were counted.
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
        """Note the largest value of a size that depends on data, and what counts it."""
        for symbol in _unbacked(size):
            self.bounds.setdefault(symbol, limit)
            self.counters.setdefault(symbol, counter)

    def counter(self, sizes: Sequence[int | torch.SymInt], name: str) -> str:
        """Return what counts the entries of a tensor, "" where its sizes are those of the batch.

        Sizes that are no multiple of one count count for themselves, by the name of the tensor.
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
        samples = [self._value(expression, _SAMPLE * k) for k in range(1, _MAX_POWER + 2)]
        if self.fixed_batch is not None:
            return Extent.of(self._value(expression, self.fixed_batch))
        return _interpolated([_SAMPLE * k for k in range(1, _MAX_POWER + 2)], samples, expression)

    def _value(self, expression: Any, batch: int) -> int:
        return int(self._replaced(expression, batch))

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
                fix="replace .item(), nonzero or boolean indexing by a mask",
            )
        return self.bounds[symbol].at(batch)


class RowsInNumberError(TraceError):
    """A model that computes with what its number of rows makes, and that is no polynomial."""


def check_numbers(node: fx.Node, symbols: Symbols, where: str) -> None:
    """Raise where an op computes with a root of the number of rows, with one over it, and so on."""
    values = (one.meta.get("val") for one in node.all_input_nodes)
    numbers = (value for value in values if isinstance(value, torch.SymFloat))
    if any(symbols.number(value) is None for value in numbers):
        raise RowsInNumberError("the model computes with its number of rows", where=where)


def depends_on_numbers(size: Any) -> bool:
    """Whether a size, or what was computed of it, depends on what tensors hold."""
    return bool(_unbacked(size))


def _unbacked(size: Any) -> list[Any]:
    is_symbolic = isinstance(size, (torch.SymInt, torch.SymFloat))
    return [one for one in size.node.expr.free_symbols if _is_unbacked(one)] if is_symbolic else []


def _is_unbacked(symbol: sympy.Symbol) -> bool:
    return str(symbol).startswith("u")


def _interpolated(batches: list[int], values: list[int], expression: Any) -> Extent:
    """Return the polynomial through the samples (Newton's divided differences)."""
    differences = [Fraction(value) for value in values]
    for level in range(1, len(batches)):
        for i in range(len(batches) - 1, level - 1, -1):
            step = batches[i] - batches[i - level]
            differences[i] = (differences[i] - differences[i - 1]) / step
    coefficients = [Fraction(0)]
    for i in range(len(batches) - 1, -1, -1):  # Horner: c ← c·(B − bᵢ) + dᵢ
        shifted = [Fraction(0), *coefficients]
        scaled = [*(c * -batches[i] for c in coefficients), Fraction(0)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
        coefficients[0] += differences[i]
    if any(c.denominator != 1 for c in coefficients):
        raise TraceError(
            f"a size is no whole multiple of the batch ({expression})",
            expected="sizes such as B, 2·B or B·seq",
            fix="keep the batch as a dimension of its own",
        )
    return Extent.of(*map(int, coefficients))
