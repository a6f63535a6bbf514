"""How a split of a logical axis cuts a dim: parts laid end to end, so many blocks of a unit."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.extent import ONE, Extent
from autopar.planner.rules.terms import Concat, Dim, Leaf, leaves, size_of

Part = tuple[Extent, Extent]  # count, unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How a dim is cut: the parts in `listed`, all of them so many `times`."""

    listed: tuple[Part, ...]
    times: Extent

    def may_be_omitted(self, degree: int, batch: int, *, is_whole: bool) -> bool:
        """Whether the runtime finds the cut by itself: even, or by elements of a known size."""
        if self.times != ONE or len(self.listed) != 1:
            return False
        return self.are_even(degree, batch) or (is_whole and self.listed[0][1] == ONE)

    def are_even(self, degree: int, batch: int) -> bool:
        """Whether every rank gets as much of each part."""
        return all(count.at(batch) % degree == 0 for count, _ in self.listed)


def parts_of(dim: Dim, axis: str) -> Parts:
    """Return the parts of a dim that is split along an axis."""
    if isinstance(dim, Leaf):
        assert dim.name == axis, f"{axis} does not occur in every part of the dim"
        return Parts(listed=((dim.size, ONE),), times=ONE)
    if isinstance(dim, Concat):
        every = [parts_of(part, axis) for part in dim.parts]
        listed = tuple(part for inner in every for part in inner.listed * inner.times.at(0))
        return Parts(listed=listed, times=ONE)
    place = next(
        i for i, factor in enumerate(dim.factors) if any(x.name == axis for x in leaves(factor))
    )
    own, times, inside = parts_of(dim.factors[place], axis), ONE, ONE
    for factor in dim.factors[:place]:
        times = times * size_of(factor)
    for factor in dim.factors[place + 1 :]:
        inside = inside * size_of(factor)
    listed = tuple((count, unit * inside) for count, unit in own.listed)
    return Parts(listed=listed, times=own.times * times)
