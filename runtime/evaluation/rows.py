"""Deals the rows of an evaluation to data ranks, so that each row counts once.

All ranks get the same number of microbatches, and each microbatch has the size of the plan. The
last rows of a dataset may not fill a microbatch, and are repeated: of 5 rows with 4 to a
microbatch, the last row fills a microbatch four times. All rows of a microbatch are repeated
equally often, so their mean is unchanged.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from autopar.runtime.data.batches import Batch, Example, example_of, gathered_rows
from autopar.runtime.data.epochs import RowCounts, each_rank, share_of
from autopar.runtime.data.row_faults import agreed, check_same_length
from autopar.runtime.data.rows import (
    Collate,
    ListedRows,
    RowPlace,
    built_collate,
    exit_on_row_error,
    is_streamed,
    listed_rows,
    tell,
    to_device,
)
from autopar.runtime.ranks.leaving import refusals_of_workers, refuse
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.ranks.user_code import exit_on_error

__all__ = ["read_evaluation"]  # for scripts

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Deals the rows of a dataset in blocks: of each block, every data rank gets a microbatch.

    `each` is the number of rows in a microbatch, for each data rank. A dealer with `fills` repeats
    the last rows if they do not fill a block. Without it they are dropped, as is needed for a model
    that mixes rows of a batch.
    """

    each: Sequence[int]
    rank: int
    fills: bool = True

    @property
    def block(self) -> int:
        """The rows of a block: of one microbatch for each data rank."""
        return sum(self.each)

    @property
    def size(self) -> int:
        """The rows of this rank's microbatch."""
        return self.each[self.rank]

    def deal(self, rows: Iterable[Row]) -> Iterator[tuple[list[Row], int]]:
        """Yield (microbatch, times) for this rank; `times` is how often each row occurs in it.

        A rank that has no more rows, while others still do, gets a filler: any row, with `times` 0.
        """
        left = iter(rows)
        while block := list(islice(left, self.block)):
            if len(block) == self.block:
                before = sum(self.each[: self.rank])
                yield block[before : before + self.size], 1
            elif self.fills:
                yield from self._filled(block)

    def _filled(self, block: Sequence[Row]) -> Iterator[tuple[list[Row], int]]:
        """Yield this rank's microbatches of the last block; all ranks get the same number."""
        pieces, start = [], 0
        for size in self.each:
            stop = min(start + size, len(block))
            pieces.append(list(_pieces(block[start:stop], size)))
            start = stop
        for ranks in zip_longest(*pieces, fillvalue=(block[:1], 0)):
            rows, times = ranks[self.rank]
            yield list(rows) * (self.size // len(rows)), times


def _pieces(rows: Sequence[Row], size: int) -> Iterator[tuple[Sequence[Row], int]]:
    """Split rows into pieces whose length divides the microbatch size."""
    while rows:
        most = min(size, len(rows))
        length = next(one for one in range(most, 0, -1) if size % one == 0)
        yield rows[:length], size // length
        rows = rows[length:]


MAKER = "build_eval_dataset"
MOST_STREAMED = 10**6  # rows of a stream, which are held in memory


def read_evaluation(
    example_batch: Example,
    new_dataset: Callable[[], Any],
    options: Namespace,
    mesh: Mesh,
    *,
    microbatch: RowCounts,
    new_collate: Callable[[], Collate] | None = None,
    rows_over: Axis = ALONE,
    own: Collection[str] = (),
    fills: bool = True,
) -> EvaluationRows | None:
    """Return the rows for evaluation, or None if there is no evaluation.

    Each rank of `rows_over` reads a share of a microbatch, and gathers all keys except `own`. If
    the model mixes rows (not `fills`), the last rows that do not fill a microbatch are dropped.
    """
    if not options.eval_every or options.data == "synthetic" or mesh.is_dry_run:
        return None
    each = each_rank(microbatch, mesh.data)
    dealer = Dealer(each=each, rank=mesh.data.rank, fills=fills)
    example = example_of(example_batch, dealer.size, options.seed)
    with seeded(options.seed):
        dataset = _built(new_dataset)
    collate = built_collate(new_collate, options.seed)
    check_same_length(len(dataset), MAKER, mesh)
    if not fills:
        _tell_dropped(len(dataset), dealer, mesh)
    share = share_of(dealer.size, rows_over)
    listed = listed_rows(dataset, example, collate, share, mesh, seed=options.seed)
    return EvaluationRows(listed, dealer, options, mesh, rows_over, own)


def _built(new_dataset: Callable[[], Any]) -> Any:
    """Return the dataset, or for a stream the list of its rows."""
    with exit_on_error(f"{MAKER}() of the model file"):
        dataset = new_dataset()
    if not is_streamed(dataset, maker=MAKER):
        return dataset
    with exit_on_row_error(dataset):
        rows = list(islice(dataset, MOST_STREAMED + 1))
    if len(rows) > MOST_STREAMED:
        refuse(
            f"{MAKER}() streams more than {MOST_STREAMED:,} rows, and a stream is held in memory",
            fix="let it end earlier, or give it __len__ and __getitem__",
        )
    is_streamed(rows, maker=MAKER)  # exits if there are no rows
    return rows


def _tell_dropped(rows: int, dealer: Dealer, mesh: Mesh) -> None:
    """Print how many rows are dropped; exit if none would be left."""
    met = f"whose rows depend on each other in batches of {dealer.block}"
    if rows < dealer.block:
        refuse(
            f"{MAKER}() has {rows} rows, and is for a model {met}",
            fix=f"let it have {dealer.block} rows, or a multiple of that",
        )
    if left := rows % dealer.block:
        tell([f"{left} of the {rows:,} rows of {MAKER}() are left out, for a model {met}"], mesh)


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """The rows for evaluation, and how this rank reads its microbatches."""

    listed: ListedRows
    dealer: Dealer
    options: Namespace
    mesh: Mesh
    rows_over: Axis
    own: Collection[str]  # keys of which each rank of `rows_over` keeps a share

    @property
    def count(self) -> int:
        """The number of rows, without dropped ones."""
        rows = len(self.listed.rows)
        return rows if self.dealer.fills else rows - rows % self.dealer.block

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's (microbatch, times); see `Dealer.deal`."""
        mesh = self.mesh
        dealt = self.dealer.deal(range(len(self.listed.rows)))
        places = ([RowPlace(0, n) for n in numbers[self.listed.read]] for numbers, _ in dealt)
        loader = DataLoader(
            self.listed.rows,
            batch_sampler=places,
            collate_fn=self.listed.batch_of,
            num_workers=self.options.workers,
            pin_memory=mesh.device.type == "cuda",
        )
        times = (times for _, times in self.dealer.deal(range(len(self.listed.rows))))
        with refusals_of_workers():
            yield from zip(agreed(iter(loader), self.rows_over, mesh), times, strict=True)

    def to_device(self, batch: Batch) -> Batch:
        """Return a microbatch as the model needs it: on the device, with gathered rows."""
        batch = to_device(batch, self.mesh, self.options.dtype)
        if self.rows_over.size == 1:
            return batch
        return gathered_rows(batch, self.own, self.rows_over, rows=self.dealer.size)

    def whole(self, batch: Batch) -> Batch:
        """Return a microbatch with all rows, also for keys of which each rank keeps a share."""
        own = {key: batch[key] for key in self.own}
        return {**batch, **gathered_rows(own, (), self.rows_over, rows=self.dealer.size)}
