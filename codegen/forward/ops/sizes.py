"""Turns sizes into expressions: read from the shape of a value, named by the module, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.codegen.forward.reading.parts import Parts, parts_of
from autopar.codegen.forward.reading.split import Split
from autopar.codegen.forward.text.expressions import (
    Expression,
    Fact,
    Form,
    Held,
    Level,
    binary,
    call,
    joined,
)
from autopar.codegen.forward.text.literals import literal
from autopar.planner.axes.terms import Dim, Product, size_of
from autopar.planner.extent import BATCH, ONE, Extent
from autopar.planner.layouts import WHOLE, Layout


@dataclass(frozen=True, slots=True)
class Wanted:
    """A size to be printed: what the dim means, and along which axis it is local ("" is whole)."""

    dim: Dim
    axis: str

    @property
    def extent(self) -> Extent:
        """The whole size."""
        return size_of(self.dim)


def wanted(split: Split, tensor: str, layout: Layout) -> tuple[Wanted, ...]:
    """Return the sizes of a tensor in a layout."""
    return tuple(
        Wanted(dim, layout.axis if layout.axis and layout.dim == position else "")
        for position, dim in enumerate(split.axes.dims[tensor])
    )


class Sizes:
    """Finds sizes in the shapes of the values that a body has at hand."""

    def __init__(self, split: Split, axis: Form) -> None:
        self.split = split
        self.axis = axis  # the tensor axis of the mesh, as this body calls it
        self.seen: list[Held] = []
        self.sources: list[Held] = []  # of these, the ones whose shapes are read by preference
        self.known: set[Dim] = set()  # the dims of arguments

    def add(self, held: Held) -> None:
        """Have a value at hand from here on."""
        if held not in self.seen and held.tensor in self.split.axes.dims:
            self.seen.append(held)

    def add_argument(self, held: Held) -> None:
        """Have an argument at hand: its shape is read by preference."""
        self.add(held)
        self.sources.append(held)
        self.known |= set(self.split.axes.dims.get(held.tensor, ()))

    def add_converted(self, held: Held) -> None:
        """Have a converted value at hand: it may have whole what the arguments have in parts."""
        self.add(held)
        self.sources.append(held)

    def of_all(
        self, sizes: Sequence[Wanted | None], *, near: Held | None = None
    ) -> list[Expression | None]:
        """Return each size as it can be read from shapes; one value serves as many as it can.

        Shapes of arguments and converted values come first, then that of the value at hand
        (`near`), then any, but only for what depends on the batch.
        """
        best: dict[Wanted, Fact] = {}
        todo = [size for size in sizes if size is not None and size.extent != ONE]
        usual = [size for size in todo if size.dim in self.known]
        ranked = sorted(self.sources, key=lambda held: self._rank(held, usual))  # stable: earliest
        for held in ranked:
            for size, fact in self._read(held, usual).items():
                best.setdefault(size, fact)
        if near is not None:
            best = self._read(near, todo) | best
        varying = [size for size in todo if not size.extent.is_constant]
        for held in self.seen:
            for size, fact in self._read(held, varying).items():
                best.setdefault(size, fact)
        return [None if size is None else best.get(size) or self._product(size) for size in sizes]

    def _rank(self, held: Held, sizes: Sequence[Wanted]) -> tuple[int, bool]:
        """Return what is least for the value that tells most sizes, and that of the batch."""
        told = self._read(held, sizes)
        return -len(told), all(size.extent.is_constant for size in told)

    def _read(self, held: Held, sizes: Sequence[Wanted]) -> dict[Wanted, Fact]:
        found: dict[Wanted, Fact] = {}
        for position, size in enumerate(wanted(self.split, held.tensor, held.layout)):
            if size in sizes and size not in found:
                found[size] = Fact(held, f"shape[{position}]")
        return found

    def _product(self, size: Wanted) -> Expression | None:
        """Return a size as the product of what it consists of, where that can be read."""
        if size.axis or not isinstance(size.dim, Product) or size.extent.is_constant:
            return None
        factors = [
            literal(size_of(factor).at(0))
            if size_of(factor).is_constant
            else next(iter(self.of_all([Wanted(factor, "")])))
            for factor in size.dim.factors
        ]
        known = [factor for factor in factors if factor is not None]
        return _chain(known, "*", Level.PRODUCT) if len(known) == len(factors) else None

    def whole(self, extent: Extent) -> Expression:
        """Return a size that no dim tells more of: a number, or so many times the batch."""
        if extent.is_constant:
            return literal(extent.at(0))
        for held in self.seen:
            for position, size in enumerate(self.split.graph.tensors[held.tensor].shape):
                local = held.layout.axis and held.layout.dim == position
                if size == extent and not local:
                    return Fact(held, f"shape[{position}]")
        if extent == BATCH:  # split in everything at hand
            return literal(self.split.batch)
        batch, total = self.whole(BATCH), None
        for power, factor in enumerate(extent.coefficients):
            if factor:
                factors = [literal(factor)] * (factor != 1 or not power) + [batch] * power
                term = _chain(factors, "*", Level.PRODUCT)
                total = term if total is None else binary(total, "+", term, Level.SUM)
        assert total is not None
        return total

    def local(self, size: Wanted) -> Expression:
        """Return the rank's share of a size from the degree of the axis."""
        parts = parts_of(size.dim, size.axis)
        total = size.extent
        if total.is_constant and parts.are_even(self.split.degree, self.split.batch):
            ways = Form((*self.axis.parts, ".size"))
            return binary(literal(total.at(0)), "//", ways, Level.PRODUCT)
        return call("local_size", self.listed(parts), self.axis, is_tensor=False)

    def listed(self, parts: Parts) -> Expression:
        """Return parts as they are printed: repeated where something lies outside of the axis."""
        alike = len(set(parts.listed)) == 1
        shown = parts.listed[:1] if alike else parts.listed
        times = parts.times * Extent.of(len(parts.listed) // len(shown))
        printed = joined(
            tuple(joined((self.whole(count), self.whole(unit))) for count, unit in shown)
        )
        if times == ONE:
            return printed
        return binary(printed, "*", self.whole(times), Level.PRODUCT)

    def named(self, size: Wanted, numbers: Sequence[tuple[str, int | float]]) -> str | None:
        """Return the module's own name for a whole size, where its name and its value agree."""
        if size.axis or not size.extent.is_constant:
            return None
        axis = self.split.axes.text(size.dim)
        alike = [name for name, value in numbers if value == size.extent.at(0)]
        best = [name for name in alike if axis in name]
        if best:
            return best[0]
        sole = len(alike) == 1 and alike[0].endswith(("dim", "size", "heads", "channels"))
        return alike[0] if sole else None


def whole_sizes(split: Split, tensor: str) -> tuple[Wanted, ...]:
    """Return the sizes of a tensor that is not split."""
    return wanted(split, tensor, WHOLE)


def _chain(items: Sequence[Expression], operator: str, level: Level) -> Expression:
    total = items[0]
    for item in items[1:]:
        total = binary(total, operator, item, level)
    return total
