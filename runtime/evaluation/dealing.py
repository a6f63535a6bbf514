"""Deals the rows of a dataset to data ranks: each row counts once, and all ranks are as long at it.

A microbatch always has the rows that the plan has for it. Those at the end of a dataset that do not
fill one are repeated: of 5 rows with 4 to a microbatch, the last one stands in it four times. Where
every row is there as often as the others, their mean is what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Gives each data rank its microbatches of a dataset, one of all ranks after another.

    `each` are the rows of a microbatch of every data rank. A dealer that `fills` repeats rows where
    too few are left; another leaves these out, as it must where rows meet each other.
    """

    each: Sequence[int]
    rank: int
    fills: bool = True

    @property
    def block(self) -> int:
        """The rows of the microbatches that all data ranks have at once."""
        return sum(self.each)

    @property
    def size(self) -> int:
        """The rows of this rank's microbatch."""
        return self.each[self.rank]

    def deal(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], int]]:
        """Yield this rank's microbatches, and how often each of its rows is there.

        One that fills up the time in which other ranks have rows is there 0 times.
        """
        left = iter(rows)
        while block := list(islice(left, self.block)):
            if len(block) == self.block:
                before = sum(self.each[: self.rank])
                yield block[before : before + self.size], 1
            elif self.fills:
                yield from self._filled(block)

    def _filled(self, block: Sequence[Row]) -> Iterator[tuple[list[Row], int]]:
        """Yield this rank's microbatches of too few rows, as many as any other rank has."""
        pieces, start = [], 0
        for size in self.each:
            stop = min(start + size, len(block))
            pieces.append(list(_pieces(block[start:stop], size)))
            start = stop
        for ranks in zip_longest(*pieces, fillvalue=(block[:1], 0)):
            rows, times = ranks[self.rank]
            yield list(rows) * (self.size // len(rows)), times


def _pieces(rows: Sequence[Row], size: int) -> Iterator[tuple[Sequence[Row], int]]:
    """Cut rows so that each piece fills a microbatch of this size some whole number of times."""
    while rows:
        most = min(size, len(rows))
        length = next(one for one in range(most, 0, -1) if size % one == 0)
        yield rows[:length], size // length
        rows = rows[length:]
