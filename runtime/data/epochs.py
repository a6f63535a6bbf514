"""Groups the rows of an epoch into steps, and distributes them over data ranks.

A full step gives each data rank as many rows as the plan says. A step with fewer rows (the last of
an epoch) distributes them evenly over the microbatches of all ranks. If rows are too few for all
microbatches, the last ones repeat a row with weight 0.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, islice, pairwise, repeat
from math import ceil
from typing import Any, TypeAlias, TypeVar

from autopar.runtime.data.rows import is_streamed
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.slices import cut

# rows of a microbatch: the same on all data ranks, or one number per rank
RowCounts: TypeAlias = int | Sequence[int]


class LastRows(StrEnum):
    """What happens to the last rows of an epoch if they do not fill a step."""

    RUN_ON = "run-on"  # they form a step together with rows of the next epoch
    DROP = "drop"  # no step has them
    PAD = "pad"  # they form a smaller step; its loss is the mean over these rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """How the rows of a dataset are grouped into steps.

    A position counts the rows of finished epochs, dropped ones too, and those read in the current
    epoch. `rows` may be None (unknown) with RUN_ON.
    """

    rows: int | None
    per_step: int
    last: LastRows = LastRows.RUN_ON

    def passes(self, begun: int) -> Iterator[tuple[int | None, Iterator[int]]]:
        """Yield (remaining rows, the rows of each remaining step) for each epoch.

        With RUN_ON there is one endless epoch, whose number of rows is None.
        """
        if self.rows is None or self.last is LastRows.RUN_ON:
            yield None, repeat(self.per_step)
            return
        left = self.rows - begun % self.rows
        while True:
            yield left, self._steps(left)
            left = self.rows

    def last_steps(self, begun: int) -> set[int]:
        """Return the numbers of rows of smaller last steps (PAD), in this epoch and later ones."""
        if self.rows is None or self.last is not LastRows.PAD:
            return set()
        lefts = (self.rows % self.per_step, (self.rows - begun % self.rows) % self.per_step)
        return {left for left in lefts if left}

    def position(self, begun: int, steps: int) -> int:
        """Return the position `steps` steps after the position `begun`."""
        if self.rows is None or self.last is LastRows.RUN_ON:
            return begun + steps * self.per_step
        first = self._count(self.rows - begun % self.rows)
        if steps < first:
            return begun + steps * self.per_step
        whole, rest = divmod(steps - first, self._count(self.rows))
        return (begun // self.rows + 1 + whole) * self.rows + rest * self.per_step

    def steps_until(self, epochs: Fraction, begun: int) -> int:
        """Return how many steps it takes from position `begun` to the end of `epochs` epochs."""
        assert self.rows is not None
        target = ceil(epochs * self.rows)
        if target <= begun:
            return 0
        if self.last is LastRows.RUN_ON:
            return _ceil(target - begun, self.per_step)
        (epoch, row), (last, part) = divmod(begun, self.rows), divmod(target, self.rows)
        if last == epoch:
            return min(_ceil(part - row, self.per_step), self._count(self.rows - row))
        whole = (last - epoch - 1) * self._count(self.rows)
        rest = min(_ceil(part, self.per_step), self._count(self.rows))
        return self._count(self.rows - row) + whole + rest

    def _count(self, rows: int) -> int:
        """Return how many steps the remaining rows of an epoch make."""
        return rows // self.per_step if self.last is LastRows.DROP else _ceil(rows, self.per_step)

    def _steps(self, rows: int) -> Iterator[int]:
        whole, left = divmod(rows, self.per_step)
        yield from repeat(self.per_step, whole)
        if left and self.last is LastRows.PAD:
            yield left


def epochs_of(dataset: Any, options: Namespace, rows_per_step: int) -> Epochs:
    """Return how a dataset is grouped into steps; exit if the options do not fit the dataset.

    Without a dataset (None), there are no epochs, and all steps are full.
    """
    if dataset is None:
        return Epochs(rows=None, per_step=rows_per_step)
    last, is_counted = LastRows(options.last_rows), options.epochs is not None
    if last is LastRows.RUN_ON and not is_counted:
        return Epochs(rows=None, per_step=rows_per_step)
    rows, name = known_length(dataset), f"the dataset ({type(dataset).__name__})"
    if rows is None:
        refuse(
            f"{'--epochs' if is_counted else f'--last-rows {last}'} is for a dataset whose rows "
            f"are counted, and {name} has no length",
            fix="give it __len__, or train by --steps alone",
        )
    if rows < rows_per_step and last is LastRows.DROP:
        refuse(
            f"{name} has {rows:,} rows, fewer than the {rows_per_step:,} of a step: --last-rows "
            "drop leaves none of them",
            fix="--last-rows pad or run-on, or plan for a smaller --global-batch",
        )
    return Epochs(rows=rows, per_step=rows_per_step, last=last)


def known_length(dataset: Any) -> int | None:
    """Return the number of rows of a dataset, or None for a stream without a length."""
    if not is_streamed(dataset):
        return len(dataset)
    try:
        return len(dataset) or None
    except (TypeError, NotImplementedError):  # torch's own streams raise either
        return None


def _ceil(rows: int, per_step: int) -> int:
    return -(-rows // per_step)


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A microbatch: its number of rows on all data ranks, and the slice of one rank.

    `part` is the weight of the rank's mean loss, because losses are averaged over ranks: the rank's
    rows divided by the step's rows, times the number of ranks.
    """

    block: int
    own: slice
    part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """Distributes the rows of a step over data ranks, as seen from one rank.

    `each` is the number of rows in a microbatch, for each data rank; `fewest` is the smallest
    allowed number. Only if `may_repeat` is set may a rank repeat a row, with weight 0.
    """

    each: tuple[int, ...]
    rank: int
    microbatches: int = 1
    fewest: int = 1
    may_repeat: bool = True

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
        """Return this rank's microbatches in a step of `rows` rows."""
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
            for _ in own:  # dropped rows are read as well: a stream has them before the next epoch
                pass

    def _microbatches(self, rows: Iterator[Row], step: int) -> Iterator[list[Row]]:
        block: list[Row] = []
        for share in self.shares(step):
            block = list(islice(rows, share.block)) or block[:1]
            yield block[share.own] or block[:1] * self.fewest

    def check(self, rows: int) -> None:
        """Exit if a step of `rows` rows cannot be distributed."""
        counts = _counts(self, rows)
        if counts and (self.may_repeat or all(counts)):
            return
        every = len(self.each) * self.microbatches
        own = "" if self.may_repeat else ", none of them repeated"
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
    """Return the rows of each microbatch on each data rank, block by block; () if impossible.

    A step with fewer rows puts `fewest` rows into as many microbatches as possible. It distributes
    the remaining rows over these in proportion to the room that is left.
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


def each_rank(rows: RowCounts, data: Axis) -> Sequence[int]:
    """Return the rows of a microbatch, for each data rank."""
    return [rows] * data.size if isinstance(rows, int) else rows


def share_of(rows: int, axis: Axis) -> slice:
    """Return the slice of `rows` rows that belongs to this rank of an axis."""
    return slice(*cut(((rows, 1),), axis.size).ranges[axis.rank][0])
