"""Turns a dataset that is read from its beginning to its end into the batches of one data rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from autopar.runtime.data.collated import Row, stacked
from autopar.runtime.data.dataset_rows import row_of, told_of_row
from autopar.runtime.data.epochs import Epochs
from autopar.runtime.data.row_faults import columns_of
from autopar.runtime.data.shares import Dealing
from autopar.runtime.ranks.randomness import kept_numbers, mixed_seed, seed_numbers
from autopar.runtime.ranks.refusal import refuse

_END = object()
Placed = tuple[tuple[int, int], Any]  # the time through the data and the number of a row, the row


class StreamedRows(IterableDataset[Row]):
    """The batches of this data rank from a stream of rows: every rank reads the whole stream.

    Row n of the stream is row n of the training under every plan, in the order in which it comes.
    What is drawn for a row follows from the seed and its place. At its end the stream begins anew.
    """

    def __init__(
        self,
        dataset: Any,
        batch_of: Callable[[list[Placed]], Row],
        dealing: Dealing,
        epochs: Epochs,
        *,
        seed: int,
        skip: int = 0,
    ) -> None:
        self.dataset, self.batch_of, self.seed = dataset, batch_of, seed
        self.dealing, self.epochs, self.skip = dealing, epochs, skip

    def __iter__(self) -> Iterator[Row]:
        """Yield this rank's batches without end."""
        rows = islice(self._all_rows(), self.skip, None)
        return map(self.batch_of, self.dealing.dealt(rows, self.epochs, self.skip))

    def _all_rows(self) -> Iterator[Placed]:
        for epoch in count():
            number = -1
            stream = self._opened(epoch)
            for number in count():
                with kept_numbers():
                    seed_numbers(mixed_seed(self.seed, epoch, number))
                    with told_of_row(self.dataset):
                        row = next(stream, _END)
                self._check_length(number, is_end=row is _END)
                if row is _END:
                    break
                yield (epoch, number), row
            if number == 0:
                refuse_empty(self.dataset, is_first=epoch == 0)

    def _check_length(self, number: int, *, is_end: bool) -> None:
        """Leave where a stream has fewer rows than it says, or more, and steps count on it."""
        told = self.epochs.rows
        if told is not None and is_end != (number == told) and number:
            refuse(
                f"the dataset ({type(self.dataset).__name__}) says that it has {told:,} rows, and "
                f"gives {f'{number:,}' if is_end else 'more'}",
                fix="let __len__ return how many rows __iter__ gives",
            )

    def _opened(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):  # Hugging Face's streams are shuffled anew so
            self.dataset.set_epoch(epoch)
        with kept_numbers():
            seed_numbers(mixed_seed(self.seed, epoch))
            with told_of_row(self.dataset):
                return iter(self.dataset)


class Alike:
    """Stacks the columns of a stream's rows, which are checked as they come."""

    def __init__(self, dataset: Any, example: Mapping[str, Tensor], own: slice) -> None:
        self.dataset, self.columns, self.own = dataset, columns_of(example), own

    def __call__(self, placed: list[Placed]) -> Row:
        """Return a batch of rows that stand beside their places."""
        rows = [row for _, row in placed[self.own]]
        return stacked([row_of(row, self.columns, self.dataset) for row in rows])


def refuse_empty(dataset: Any, *, is_first: bool) -> None:
    """Leave: a stream has no rows, or none the second time."""
    name = f"the dataset ({type(dataset).__name__})"
    if is_first:
        refuse(f"{name} is empty", fix="look where build_dataset reads from")
    refuse(
        f"{name} has no rows the second time it is read",
        fix="let __iter__ begin anew each time, as a generator function does",
    )
