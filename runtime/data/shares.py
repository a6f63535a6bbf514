"""Shares out the rows of a step among its microbatches and the data ranks.

A step with all of its rows gives each data rank what the plan says. One with fewer rows (the last
of an epoch) gives each microbatch of each rank about as many; where there are too few even for
that, the last microbatches repeat a row, which counts 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import TypeVar

from autopar.runtime.data.epochs import Epochs
from autopar.runtime.ranks.refusal import refuse

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A microbatch: the rows that all data ranks have of it, and which of these one rank has.

    `part` is the weight of the rank's mean loss, if the losses of all ranks are averaged: its rows
    over those of the step, times the number of ranks.
    """

    block: int
    own: slice
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """What each data rank has of a step, seen from one of them.

    `each` are the rows of a microbatch of every data rank, and `fewest` those that a microbatch has
    to have. Only a dealing that `repeats` gives a rank a row that counts 0.
    """

    each: tuple[int, ...]
    rank: int
    microbatches: int = 1
    fewest: int = 1
    repeats: bool = True

    @property
    def block(self) -> int:
        """The rows of a microbatch of all data ranks together."""
        return sum(self.each)

    @property
    def per_step(self) -> int:
        """The rows of a step."""
        return self.block * self.microbatches

    @property
    def size(self) -> int:
        """The rows of a microbatch of this rank."""
        return self.each[self.rank]

    def shares(self, rows: int) -> tuple[Share, ...]:
        """Return this rank's microbatches of a step of so many rows."""
        return _shares(self, rows)

    def parts(self, epochs: Epochs, begun: int) -> Iterator[float]:
        """Yield the weight of one microbatch of this rank after another, without end."""
        for _, steps in epochs.passes(begun):
            for rows in steps:
                yield from (share.part for share in self.shares(rows))

    def dealt(self, rows: Iterator[Row], epochs: Epochs, begun: int) -> Iterator[list[Row]]:
        """Yield this rank's rows of one microbatch after another, from all rows of the dataset."""
        for left, steps in epochs.passes(begun):
            own = rows if left is None else islice(rows, left)
            for step in steps:
                yield from self._microbatches(own, step)
            for _ in own:  # what is dropped is read: of a stream it comes before the next epoch
                pass

    def _microbatches(self, rows: Iterator[Row], step: int) -> Iterator[list[Row]]:
        block: list[Row] = []
        for share in self.shares(step):
            block = list(islice(rows, share.block)) or block[:1]
            yield block[share.own] or block[:1] * self.fewest

    def check(self, rows: int) -> None:
        """Leave where a step of so many rows cannot be shared out."""
        counts = _counts(self, rows)
        if counts and (self.repeats or all(counts)):
            return
        every, own = len(self.each) * self.microbatches, "" if self.repeats else ", each of its own"
        refuse(
            f"--last-rows pad: the last step of an epoch has {rows:,} rows, and this plan cannot "
            f"share them out among {every} microbatches of {self.fewest} or more rows{own}",
            fix="--last-rows drop or run-on, or plan for a --global-batch that divides the rows",
        )


@lru_cache(maxsize=8)
def _shares(dealing: Dealing, rows: int) -> tuple[Share, ...]:
    ranks, counts = len(dealing.each), _counts(dealing, rows)
    found = []
    for start in range(0, len(counts), ranks):
        block = counts[start : start + ranks]
        before, own = sum(block[: dealing.rank]), block[dealing.rank]
        part = own * ranks / rows
        found.append(Share(block=sum(block), own=slice(before, before + own), part=part))
    return tuple(found)


def _counts(dealing: Dealing, rows: int) -> Sequence[int]:
    """Return the rows of each microbatch of each data rank, block by block; () if there is no way.

    Of fewer rows than those of a step, as many microbatches as can be have the fewest rows. The
    others of these rows are shared out by what room there is.
    """
    most = dealing.each * dealing.microbatches
    if rows == dealing.per_step:
        return most
    used = min(len(most), rows // dealing.fewest)
    room = [size - dealing.fewest for size in most[:used]]
    rest = rows - used * dealing.fewest
    if not used or rest > sum(room):
        return ()
    ends = [rest * filled // max(1, sum(room)) for filled in accumulate(room, initial=0)]
    counts = [dealing.fewest + stop - start for start, stop in pairwise(ends)]
    return counts + [0] * (len(most) - used)
