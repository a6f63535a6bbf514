"""Sizes that may depend on the batch: polynomials in B with integer coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from itertools import zip_longest
from math import prod


@total_ordering
@dataclass(frozen=True, slots=True)
class Extent:
    """A size c₀ + c₁·B + c₂·B² + …, where B is the batch; no trailing zero coefficients."""

    coefficients: tuple[int, ...]

    @staticmethod
    def of(*coefficients: int) -> Extent:
        """Return the extent with these coefficients, lowest power first."""
        end = len(coefficients)
        while end and coefficients[end - 1] == 0:
            end -= 1
        return Extent(coefficients[:end])

    @property
    def is_constant(self) -> bool:
        """Whether the size is the same for every batch."""
        return len(self.coefficients) <= 1

    def at(self, batch: int) -> int:
        """Return the size for one batch."""
        if self.is_constant:  # by far the most common case
            return self.coefficients[0] if self.coefficients else 0
        return sum(c * batch**power for power, c in enumerate(self.coefficients))

    def __add__(self, other: Extent) -> Extent:
        return Extent.of(*map(sum, zip_longest(self.coefficients, other.coefficients, fillvalue=0)))

    def __sub__(self, other: Extent) -> Extent:
        return self + other * Extent.of(-1)

    def __mul__(self, other: Extent) -> Extent:
        if self.is_constant and other.is_constant:
            return Extent.of(self.at(0) * other.at(0))
        product = [0] * (len(self.coefficients) + len(other.coefficients))
        for i, a in enumerate(self.coefficients):
            for j, b in enumerate(other.coefficients):
                product[i + j] += a * b
        return Extent.of(*product)

    def divided_by(self, divisor: Extent) -> Extent | None:
        """Return the exact quotient, or None where there is none with integer coefficients."""
        rest, quotient = list(self.coefficients), [0] * len(self.coefficients)
        lead = len(divisor.coefficients) - 1
        if lead < 0:
            return None
        for power in range(len(rest) - 1, lead - 1, -1):
            factor, remainder = divmod(rest[power], divisor.coefficients[lead])
            if remainder:
                return None
            quotient[power - lead] = factor
            for k, c in enumerate(divisor.coefficients):
                rest[power - lead + k] -= factor * c
        return None if any(rest) else Extent.of(*quotient)

    def __lt__(self, other: Extent) -> bool:
        """Compare for large batches: the higher power decides."""
        size = max(len(self.coefficients), len(other.coefficients))
        return _padded(self, size)[::-1] < _padded(other, size)[::-1]

    def __str__(self) -> str:
        terms = [_term(c, power) for power, c in enumerate(self.coefficients) if c]
        return " + ".join(reversed(terms)) or "0"


ONE = Extent((1,))
BATCH = Extent((0, 1))


def constant(size: int) -> Extent:
    """Return the extent that is `size` for every batch."""
    return Extent.of(size)


def numel(shape: tuple[Extent, ...]) -> Extent:
    """Return the number of elements of a tensor."""
    if all(size.is_constant for size in shape):
        return constant(prod(size.at(0) for size in shape))
    total = ONE
    for size in shape:
        total = total * size
    return total


def _padded(extent: Extent, size: int) -> tuple[int, ...]:
    return extent.coefficients + (0,) * (size - len(extent.coefficients))


def _term(coefficient: int, power: int) -> str:
    batch = {0: "", 1: "B"}.get(power, f"B^{power}")
    if not batch:
        return str(coefficient)
    return batch if coefficient == 1 else f"{coefficient}·{batch}"
