"""Prints sizes as the author would: read from tensors, or computed from them.

Sizes that vary with the lengths of rows become arithmetic on available lengths. The model is traced
twice, with different lengths, so each number has two values. The simplest arithmetic that gives
both values is taken to be the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement

from autopar.codegen.forward.reading.split import SplitGraph, parts_of_dim
from autopar.codegen.text.expressions import (
    Binding,
    Expression,
    Fact,
    LocalTensor,
    SourceForm,
    binary,
    call,
    joined,
    literal,
)
from autopar.planner.graph.layouts import Layout
from autopar.planner.graph.ops import BATCH, ONE, Extent
from autopar.planner.rules.signature import Dim, FlattenedDims, size_of

Pair = tuple[int, int]  # a number in the first trace, and in the second
Lengths = Mapping[Pair, Expression]


def derived(number: Pair, lengths: Lengths) -> Expression | None:
    """Return a number as arithmetic on lengths, or None if no form in the table fits."""
    tried = (form(number, lengths) for form in _FORMS)
    return next((found for found in tried if found is not None), None)


def _length(number: Pair, lengths: Lengths) -> Expression | None:
    return lengths.get(number)


def _multiple_or_part(number: Pair, lengths: Lengths) -> Expression | None:
    """times · length, or ⌊length ÷ parts⌋."""
    for (here, other), shown in lengths.items():
        times = number[0] // here
        if times and (times * here, times * other) == number:
            return _times(shown, times)
        parts = here // number[0] if number[0] else 0
        if parts and (here // parts, other // parts) == number:
            return _divided_size(shown, parts)
    return None


def _product(number: Pair, lengths: Lengths) -> Expression | None:
    """length · length · times."""
    for (one, shown), (two, more) in combinations_with_replacement(lengths.items(), 2):
        times = number[0] // (one[0] * two[0])
        if times and (times * one[0] * two[0], times * one[1] * two[1]) == number:
            return _times(product([shown, more]), times)
    return None


def _rounded_up(number: Pair, lengths: Lengths) -> Expression | None:
    """⌈length ÷ parts⌉, as in a convolution with stride 2 and padding."""
    for (here, other), shown in lengths.items():
        for parts in _parts(other - here, number[1] - number[0]):
            up = parts - 1
            if ((here + up) // parts, (other + up) // parts) == number:
                return _divided_size(_plus(shown, up), parts)
    return None


def _multiple_and_more(number: Pair, lengths: Lengths) -> Expression | None:
    """times · length + added, where |added| < length."""
    for (here, other), shown in lengths.items():
        times, rest = divmod(number[1] - number[0], other - here)
        added = number[0] - times * here
        if not rest and times > 0 and abs(added) < here:
            return _plus(_times(shown, times), added)
    return None


def _part_of_more(number: Pair, lengths: Lengths) -> Expression | None:
    """⌊(length + added) ÷ parts⌋."""
    for length, shown in lengths.items():
        for parts in _parts(length[1] - length[0], number[1] - number[0]):
            added = _added([*zip(length, number, strict=True)], parts)
            if added is not None:
                return _divided_size(_plus(shown, added), parts)
    return None


_FORMS = (_length, _multiple_or_part, _product, _rounded_up, _multiple_and_more, _part_of_more)


def _parts(more: int, part_more: int) -> Iterator[int]:
    """Yield possible divisors, if a length grows by `more` while its part grows by `part_more`."""
    if more > part_more > 0:
        yield from sorted({max(2, more // part_more), max(2, -(-more // part_more))})


def _added(pairs: Sequence[Pair], parts: int) -> int | None:
    """Return the constant added before a division: ⌊(length + added) ÷ parts⌋ = part.

    Convolutions and pools shorten rows in this way. None if no constant fits all pairs, or if
    several do, but neither 0 (rounding down) nor parts - 1 (rounding up).
    """
    least = max(part * parts - length for length, part in pairs)
    most = min(part * parts - length for length, part in pairs) + parts - 1
    usual = [added for added in (0, parts - 1) if least <= added <= most]
    return least if least == most else next(iter(usual), None)


def _times(shown: Expression, times: int) -> Expression:
    return shown if times == 1 else product([shown, literal(times)])


def _plus(term: Expression, added: int) -> Expression:
    if not added:
        return term
    return binary(term, "+" if added > 0 else "-", literal(abs(added)), Binding.SUM)


def _divided_size(shown: Expression, parts: int) -> Expression:
    return binary(shown, "//", literal(parts), Binding.PRODUCT)


def product(factors: Sequence[Expression]) -> Expression:
    """Return the product of some numbers."""
    total = factors[0]
    for factor in factors[1:]:
        total = binary(total, "*", factor, Binding.PRODUCT)
    return total


@dataclass(frozen=True, slots=True)
class SizeToPrint:
    """A size to print: a rank's share of a dim along `axis`, or the whole dim if `axis` is "".

    `other` is the whole size in the second trace, whose inputs have other lengths.
    """

    dim: Dim
    axis: str
    other: Extent

    @property
    def extent(self) -> Extent:
        """The whole size."""
        return size_of(self.dim)

    @property
    def varies(self) -> bool:
        """Whether the size depends on the batch: on the number of rows or their lengths."""
        return not self.extent.is_constant or self.other != self.extent


def size_along(split: SplitGraph, dim: Dim, axis: str) -> SizeToPrint:
    """Return the local size of any dim along an axis, even of one that no tensor has."""
    return SizeToPrint(dim, axis, size_of(split.lengths.dim(dim)))


def wanted(split: SplitGraph, tensor: str, layout: Layout) -> tuple[SizeToPrint, ...]:
    """Return the sizes of a tensor in a layout."""
    others = split.lengths.shape(tensor)
    return tuple(
        SizeToPrint(dim, layout.axis if layout.axis and layout.dim == position else "", other)
        for position, (dim, other) in enumerate(zip(split.axes.dims[tensor], others, strict=True))
    )


class ReadableSizes:
    """Finds sizes in the shapes of a body's available values."""

    def __init__(self, split: SplitGraph, axis: SourceForm) -> None:
        self.split = split
        self.axis = axis  # the body's name of the mesh's tensor axis
        self.seen: list[LocalTensor] = []
        self.sources: list[LocalTensor] = []  # values whose shapes are preferred
        self.known: set[Dim] = set()  # the dims of arguments

    def add(self, local: LocalTensor) -> None:
        """Make a value available from here on."""
        if local not in self.seen and local.tensor in self.split.axes.dims:
            self.seen.append(local)

    def add_argument(self, local: LocalTensor) -> None:
        """Make an argument available; its shape is preferred."""
        self.add_converted(local)
        self.known |= set(self.split.axes.dims.get(local.tensor, ()))

    def add_converted(self, local: LocalTensor) -> None:
        """Make a converted value available.

        It may have whole dims of which arguments have shards.
        """
        self.add(local)
        self.sources.append(local)

    def of_all(
        self, sizes: Sequence[SizeToPrint | None], *, near: LocalTensor | None = None
    ) -> list[Expression | None]:
        """Return each size as read from shapes, from as few values as possible.

        Shapes of arguments and converted values are preferred, then that of `near`. Sizes that
        depend on the batch are also read from any other value, and lengths from any dim that
        always has the same length.
        """
        best: dict[SizeToPrint, Fact] = {}
        todo = [size for size in sizes if size is not None and size.extent != ONE]
        usual = [size for size in todo if size.dim in self.known]
        # of equal values, the earliest comes first
        ranked = sorted(self.sources, key=lambda local: self._rank(local, usual))
        for local in ranked:
            for size, fact in self._read(local, usual).items():
                best.setdefault(size, fact)
        if near is not None:
            best = self._read(near, todo) | best
        varying = [size for size in todo if size.varies]
        for local in self.seen:
            for size, fact in self._read(local, varying).items():
                best.setdefault(size, fact)
        return [None if size is None else best.get(size) or self._made(size) for size in sizes]

    def _made(self, size: SizeToPrint) -> Expression | None:
        """Return a size computed from other sizes, if these can be read."""
        found = self._product(size)
        if found is None and size.varies and size.extent.is_constant and not size.axis:
            return self._length(size.extent, size.other)
        return found

    def _rank(self, local: LocalTensor, sizes: Sequence[SizeToPrint]) -> tuple[int, bool]:
        """Return a sort key: values with most of `sizes` first, then those with varying sizes."""
        read = self._read(local, sizes)
        return -len(read), all(size.extent.is_constant for size in read)

    def _read(self, local: LocalTensor, sizes: Sequence[SizeToPrint]) -> dict[SizeToPrint, Fact]:
        found: dict[SizeToPrint, Fact] = {}
        for position, size in enumerate(wanted(self.split, local.tensor, local.layout)):
            if size in sizes and size not in found:
                found[size] = Fact(local, f"shape[{position}]")
        return found

    def _product(self, size: SizeToPrint) -> Expression | None:
        """Return a size as a product of its factors, if they can be read."""
        if size.axis or not isinstance(size.dim, FlattenedDims) or not size.varies:
            return None
        inner = [size_along(self.split, factor, "") for factor in size.dim.factors]
        factors = [
            next(iter(self.of_all([one]))) if one.varies else literal(one.extent.at(0))
            for one in inner
        ]
        known = [factor for factor in factors if factor is not None]
        return product(known) if len(known) == len(factors) else None

    def whole(self, extent: Extent, other: Extent | None = None) -> Expression:
        """Return the expression of a whole size: a number, a shape's dim, or arithmetic on these.

        `other` is its value in the second trace, if different.
        """
        other = extent if other is None else other
        if extent.is_constant and extent == other:
            return literal(extent.at(0))
        for local, place, sizes in self._readable():
            if sizes == (extent, other):
                return Fact(local, f"shape[{place}]")
        if extent.is_constant:
            return self._length(extent, other) or literal(extent.at(0))
        if extent == BATCH:  # all available values are split along the rows
            return literal(self.split.batch)
        batch, total = self.whole(BATCH), None
        for power, pair in enumerate(zip(extent.coefficients, other.coefficients, strict=True)):
            if any(pair):
                has_factor = pair != (1, 1) or not power
                factors = [self.whole(*map(Extent.of, pair))] * has_factor + [batch] * power
                term = product(factors)
                total = term if total is None else binary(total, "+", term, Binding.SUM)
        assert total is not None
        return total

    def _readable(self) -> Iterator[tuple[LocalTensor, int, tuple[Extent, Extent]]]:
        """Yield the whole dims of available values, each with its sizes in both traces."""
        for local in (*self.sources, *self.seen):
            for place, size in enumerate(wanted(self.split, local.tensor, local.layout)):
                if not size.axis:
                    yield local, place, (size.extent, size.other)

    def _length(self, extent: Extent, other: Extent) -> Expression | None:
        """Return a length of which ranks only have shards, or arithmetic on other lengths."""
        return self._from_shards(extent, other) or self._from_lengths(extent.at(0), other.at(0))

    def _from_lengths(self, here: int, other: int) -> Expression | None:
        """Return a number as arithmetic on available lengths, given its values in both traces."""
        lengths = {
            (size.at(0), another.at(0)): Fact(local, f"shape[{place}]")
            for local, place, (size, another) in reversed([*self._readable()])
            if size.is_constant and size != another
        }
        return derived((here, other), lengths)

    def _from_shards(self, extent: Extent, other: Extent) -> Expression | None:
        """Return the runtime's call that gives the whole length of a dim from its shard."""
        for local in (*self.sources, *self.seen):
            for place, size in enumerate(wanted(self.split, local.tensor, local.layout)):
                is_length = bool(size.axis) and (size.extent, size.other) == (extent, other)
                if is_length and self.may_omit_parts(size.dim, size.axis, is_whole=False):
                    return call("whole_length", local, literal(place), self.axis)
        return None

    def local(self, size: SizeToPrint) -> Expression:
        """Return the rank's share of a size, from the degree of the axis."""
        if not size.varies and self.is_shared_evenly(size.dim, size.axis):
            return self.per_rank(literal(size.extent.at(0)))
        return call("local_size", self.listed(size.dim, size.axis), self.axis)

    def per_rank(self, number: Expression, operator: str = "//") -> SourceForm:
        """Return a number divided by the size of the tensor axis."""
        ways = SourceForm((*self.axis.parts, ".size"))
        return binary(number, operator, ways, Binding.PRODUCT)

    def is_shared_evenly(self, dim: Dim, axis: str) -> bool:
        """Whether every rank gets the same number of units of each part of a dim."""
        return parts_of_dim(dim, axis).are_even(self.split.degree, self.split.batch)

    def listed(self, dim: Dim, axis: str, *, unit: int = 1) -> Expression:
        """Return the expression of a split dim's parts, `((count, unit), …)`.

        If other factors of the dim come before the axis, `* n` repeats the parts. Sizes are counted
        in units of `unit` elements: in groups of channels, say.
        """
        parts, others = parts_of_dim(dim, axis), parts_of_dim(self.split.lengths.dim(dim), axis)
        pairs = tuple(zip(parts.listed, others.listed, strict=True))
        alike = len(set(pairs)) == 1
        shown = pairs[:1] if alike else pairs
        repeated = Extent.of(len(pairs) // len(shown))
        times, other_times = parts.times * repeated, others.times * repeated
        printed = joined(
            tuple(
                joined((self.whole(count, more), self.whole(*map(partial(_divided, by=unit), own))))
                for (count, more), own in (zip(*pair, strict=True) for pair in shown)
            )
        )
        if times == other_times == ONE:
            return printed
        return binary(printed, "*", self.whole(times, other_times), Binding.PRODUCT)

    def may_omit_parts(self, dim: Dim, axis: str, *, is_whole: bool) -> bool:
        """Whether the runtime can infer how a dim is cut, so that `parts` is not needed.

        A dim that may be cut after any element needs no `parts` if the runtime has it whole
        (`is_whole`), or remembers its whole length (runtime/tensor/slices.py), as it does if
        lengths vary. With fixed lengths, a dim of equal shards needs none either.
        """
        parts = parts_of_dim(dim, axis)
        if self.split.lengths.are_known:
            return (is_whole or self.split.lengths.dim(dim) != dim) and self.are_single(dim, axis)
        return parts.may_be_omitted(self.split.degree, self.split.batch, is_whole=is_whole)

    def are_even(self, dim: Dim, axis: str) -> bool:
        """Whether all ranks hold equally many elements of a dim, in one piece."""
        parts = parts_of_dim(dim, axis)
        return parts.may_be_omitted(self.split.degree, self.split.batch, is_whole=False)

    def are_single(self, dim: Dim, axis: str) -> bool:
        """Whether a dim is cut as one part of single elements."""
        parts = parts_of_dim(dim, axis)
        return parts.times == ONE and [unit for _, unit in parts.listed] == [ONE]

    def named(self, size: SizeToPrint, numbers: Sequence[tuple[str, int | float]]) -> str | None:
        """Return the module's attribute for a whole size, if name and value agree."""
        if size.axis or size.varies:
            return None
        axis = self.split.axes.text(size.dim)
        alike = [name for name, value in numbers if value == size.extent.at(0)]
        best = [name for name in alike if axis in name]
        if best:
            return best[0]
        sole = len(alike) == 1 and alike[0].endswith(("dim", "size", "heads", "channels"))
        return alike[0] if sole else None


def _divided(extent: Extent, *, by: int) -> Extent:
    return extent if by == 1 else Extent.of(extent.at(0) // by)
