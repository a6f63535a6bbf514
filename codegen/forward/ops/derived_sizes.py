"""Turns a number that varies with the lengths of rows into arithmetic on the lengths at hand.

Two traces tell each number twice, for the lengths of the one and for those of the other. Arithmetic
that gives both is taken for what the model computes; the simplest is tried first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

from autopar.codegen.forward.text.expressions import Expression, Level, binary
from autopar.codegen.forward.text.literals import literal

Pair = tuple[int, int]  # a number in the first trace, and in the second
Lengths = Mapping[Pair, Expression]


def derived(number: Pair, lengths: Lengths) -> Expression | None:
    """Return a number as it follows from lengths, None where no form in the table gives it."""
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
            return _divided(shown, parts)
    return None


def _product(number: Pair, lengths: Lengths) -> Expression | None:
    """length · length · times."""
    for (one, shown), (two, more) in combinations_with_replacement(lengths.items(), 2):
        times = number[0] // (one[0] * two[0])
        if times and (times * one[0] * two[0], times * one[1] * two[1]) == number:
            return _times(product([shown, more]), times)
    return None


def _rounded_up(number: Pair, lengths: Lengths) -> Expression | None:
    """⌈length ÷ parts⌉, as a convolution of stride 2 that pads."""
    for (here, other), shown in lengths.items():
        for parts in _parts(other - here, number[1] - number[0]):
            up = parts - 1
            if ((here + up) // parts, (other + up) // parts) == number:
                return _divided(_plus(shown, up), parts)
    return None


def _multiple_and_more(number: Pair, lengths: Lengths) -> Expression | None:
    """times · length + added, by less than the length."""
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
                return _divided(_plus(shown, added), parts)
    return None


_FORMS = (_length, _multiple_or_part, _product, _rounded_up, _multiple_and_more, _part_of_more)


def _parts(lengths: int, parts: int) -> Iterator[int]:
    """Yield what a length may be divided by, if it grows by so much while a part does."""
    if lengths > parts > 0:
        yield from sorted({max(2, lengths // parts), max(2, -(-lengths // parts))})


def _added(pairs: Sequence[Pair], parts: int) -> int | None:
    """Return what is added to lengths before they are divided: ⌊(length + added) ÷ parts⌋ = part.

    Convolutions and pools shorten rows like that. None where no number does for all pairs, or where
    several do and none of them rounds down or up.
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
    return binary(term, "+" if added > 0 else "-", literal(abs(added)), Level.SUM)


def _divided(shown: Expression, parts: int) -> Expression:
    return binary(shown, "//", literal(parts), Level.PRODUCT)


def product(factors: Sequence[Expression]) -> Expression:
    """Return the product of some numbers."""
    total = factors[0]
    for factor in factors[1:]:
        total = binary(total, "*", factor, Level.PRODUCT)
    return total
