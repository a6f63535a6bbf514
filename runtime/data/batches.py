"""Turns a dataset, a stream, or an example batch into the microbatches of one data rank.

Step s takes rows s·G to (s+1)·G − 1 of one endless sequence; G is the global batch. Only the last
rows of an epoch may be dropped, or form a smaller step. The rows of a step are the same under every
plan. Within a step, microbatch m of all data ranks together is one contiguous block. A plan with d
data ranks therefore trains on the same rows as one process with microbatches d times as large. If
devices differ, data ranks may have different numbers of rows.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autopar.runtime.data.epochs import Dealing, Epochs, LastRows, RowCounts, each_rank, share_of
from autopar.runtime.data.row_faults import RowColumn, agreed, check_same_length, columns_of
from autopar.runtime.data.rows import (
    Collate,
    Collated,
    Row,
    RowPlace,
    built_collate,
    exit_on_row_error,
    is_streamed,
    listed_rows,
    row_of,
    stacked,
)
from autopar.runtime.ranks.leaving import refusals_of_workers, refuse
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.randomness import (
    cpu_generators_restored,
    mixed_seed,
    seed_cpu_generators,
    seeded,
)
from autopar.runtime.ranks.user_code import exit_on_error
from autopar.runtime.tensor.slices import cut, gather_along

__all__ = ["Batch", "Weighed", "read_dataset"]  # for scripts

_END = object()
Placed = tuple[tuple[int, int], Any]  # ((epoch, number of the row), the row)


class StreamedRows(IterableDataset[Row]):
    """The batches of this data rank from a stream of rows; every rank reads the whole stream.

    Row n of the stream is row n of the training under every plan. Random numbers drawn for a row
    depend on the seed and the row's position. When the stream ends, it is read again from its
    beginning.
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
                with cpu_generators_restored():
                    seed_cpu_generators(mixed_seed(self.seed, epoch, number))
                    with exit_on_row_error(self.dataset):
                        row = next(stream, _END)
                self._check_length(number, is_end=row is _END)
                if row is _END:
                    break
                yield (epoch, number), row
            if number == 0:
                refuse_empty(self.dataset, is_first=epoch == 0)

    def _check_length(self, number: int, *, is_end: bool) -> None:
        """Exit if steps depend on a stream's __len__, and the stream has more or fewer rows."""
        told = self.epochs.rows
        if told is not None and is_end != (number == told) and number:
            refuse(
                f"the dataset ({type(self.dataset).__name__}) says that it has {told:,} rows, and "
                f"gives {f'{number:,}' if is_end else 'more'}",
                fix="let __len__ return how many rows __iter__ gives",
            )

    def _opened(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):  # Hugging Face's streams are reshuffled by it
            self.dataset.set_epoch(epoch)
        with cpu_generators_restored():
            seed_cpu_generators(mixed_seed(self.seed, epoch))
            with exit_on_row_error(self.dataset):
                return iter(self.dataset)


class StreamStack:
    """Stacks the columns of a stream's rows, and checks each row."""

    def __init__(self, dataset: Any, columns: Mapping[str, RowColumn], own: slice) -> None:
        self.dataset, self.columns, self.own = dataset, columns, own

    def __call__(self, placed: list[Placed]) -> Row:
        """Return a batch of rows; each row comes with its position."""
        rows = [row for _, row in placed[self.own]]
        return stacked([row_of(row, self.columns, self.dataset) for row in rows])


def refuse_empty(dataset: Any, *, is_first: bool) -> None:
    """Exit because a stream has no rows, or no rows when it is read again."""
    name = f"the dataset ({type(dataset).__name__})"
    if is_first:
        refuse(f"{name} is empty", fix="look where build_dataset reads from")
    refuse(
        f"{name} has no rows the second time it is read",
        fix="let __iter__ begin anew each time, as a generator function does",
    )


Batch = dict[str, Tensor]
Weighed: TypeAlias = tuple[Batch, Tensor]  # a microbatch and the weight of its loss
Example: TypeAlias = Callable[[int], Mapping[str, Any]]


_LISTED = 2**16  # row numbers that are Python integers at a time: these take 5 times the memory


def shuffled(length: int, seed: int, skip: int) -> Iterator[RowPlace]:
    """Yield the positions of all rows without end, in a new order in each epoch.

    The first `skip` rows are left out.
    """
    first, begin = divmod(skip, length)
    for epoch in count(first):
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        order = torch.randperm(length, generator=generator)
        for some in order[begin:].split(_LISTED):  # type: ignore[no-untyped-call]
            yield from (RowPlace(epoch, index) for index in some.tolist())
        begin = 0


def read_dataset(new_dataset: Callable[[], Any], options: Namespace, mesh: Mesh) -> Any:
    """Return the dataset of the model file, or None if the example batch is used."""
    if options.data == "synthetic" or mesh.is_dry_run:
        return None
    with seeded(options.seed), exit_on_error("build_dataset() of the model file"):
        dataset = new_dataset()
    is_streamed(dataset)  # exits if it is no dataset
    return dataset


def weights_of(parts: Iterator[float], device: torch.device) -> Iterator[Tensor]:
    """Yield weights as tensors; each distinct weight is copied to the device only once."""
    known: dict[float, Tensor] = {}
    for part in parts:
        if part not in known:
            known[part] = torch.full((), part, dtype=torch.float64, device=device)
        yield known[part]


def dataset_batches(
    dataset: Any,
    example_batch: Example,
    mesh: Mesh,
    *,
    dealing: Dealing,
    epochs: Epochs,
    seed: int,
    skip: int = 0,
    workers: int = 0,
    rows_over: Axis = ALONE,
    new_collate: Callable[[], Collate] | None = None,
) -> Iterator[Batch]:
    """Yield this rank's microbatches of a dataset, without end, with the keys of the example.

    A training that resumes skips the rows it has seen; rows with an index are not read again.
    `workers` is the number of processes that read ahead; 0 reads in this process. Each rank of
    `rows_over` reads a share of the rows, or takes a share of a collated batch.
    """
    for left in epochs.last_steps(skip):
        dealing.check(left)
    collate = built_collate(new_collate, seed)
    example = example_of(example_batch, dealing.size, seed)
    share = share_of(dealing.size, rows_over)
    is_pinned = mesh.device.type == "cuda"
    loader: DataLoader[Any]
    if is_streamed(dataset):
        columns = columns_of(example)
        batch_of = (
            StreamStack(dataset, columns, share)
            if collate is None
            else Collated(collate, columns, share, seed=seed)
        )
        rows = StreamedRows(dataset, batch_of, dealing, epochs, seed=seed, skip=skip)
        workers = min(workers, 1)  # a stream is read in order, so only one can read ahead
        loader = DataLoader(rows, batch_size=None, num_workers=workers, pin_memory=is_pinned)
    else:
        check_same_length(len(dataset), "build_dataset", mesh)
        at_once = dealing.block if epochs.last is not LastRows.PAD else 0
        listed = listed_rows(dataset, example, collate, share, mesh, at_once=at_once, seed=seed)
        dealt = dealing.dealt(shuffled(len(dataset), seed, skip), epochs, skip)
        loader = DataLoader(
            listed.rows,
            batch_sampler=(places[listed.read] for places in dealt),
            collate_fn=listed.batch_of,
            num_workers=workers,
            pin_memory=is_pinned,
        )
    return agreed(_read(mesh.reading.timed(iter(loader))), rows_over, mesh)


def _read(loaded: Iterator[Batch]) -> Iterator[Batch]:
    """Yield a loader's batches. The caller has started the loader: its seed is drawn already."""
    with refusals_of_workers():
        yield from loaded


def synthetic_batches(
    example_batch: Example,
    mesh: Mesh,
    *,
    rows: tuple[int, RowCounts],
    seed: int,
    rows_over: Axis = ALONE,
) -> Iterator[Batch]:
    """Yield this rank's microbatches of one example batch, the same in every step.

    `rows` is the number of microbatches in a step, and the rows of each. Each rank of `rows_over`
    has a share of these rows. A model may write to its inputs, so on a CPU each step gets new
    tensors. For a GPU the same pinned tensors are yielded, because their copies there are new.
    """
    microbatches, microbatch = rows
    each = each_rank(microbatch, mesh.data)
    block = sum(each)
    before, own_rows = sum(each[: mesh.data.rank]), share_of(each[mesh.data.rank], rows_over)
    share = slice(before + own_rows.start, before + own_rows.stop)
    whole = example_of(example_batch, microbatches * block, seed)
    # contiguous, like the batches of a loader
    tensors = {key: value.contiguous() for key, value in whole.items()}
    own = [
        {key: value[start : start + block][share] for key, value in tensors.items()}
        for start in range(0, microbatches * block, block)
    ]
    if mesh.device.type == "cuda":
        pinned = [{key: value.pin_memory() for key, value in one.items()} for one in own]
        while True:
            yield from map(dict, pinned)
    while True:
        yield from ({key: value.clone() for key, value in one.items()} for one in own)


def gathered_rows(batch: Batch, own: Collection[str], axis: Axis, *, rows: int) -> Batch:
    """Return a batch with all rows of a microbatch, except for keys in `own`.

    Each rank has read a share of the rows. Gathering takes one collective for each key.
    """
    if axis.size == 1:
        return batch
    shares = cut(((rows, 1),), axis.size)
    return {
        key: value if key in own else gather_along(value, 0, shares, axis)
        for key, value in batch.items()
    }


def example_of(example_batch: Example, rows: int, seed: int) -> Batch:
    """Return the tensors of an example batch."""
    with seeded(seed):
        whole = example_batch(rows)
    return {key: value for key, value in whole.items() if isinstance(value, Tensor)}
