"""Microbatches of a rank: from rows of a dataset, of a stream, or from an example.

Turns a dataset, or an example batch, into the microbatches of one data rank.

Step s takes rows s·G to (s+1)·G − 1 of one endless sequence, where G is the global batch, unless
the last rows of an epoch are dropped or are a step of their own: the rows of a step are the same
under every plan. Within a step, microbatch m of all data ranks together is one block of it, so a
plan with d data ranks trains on what one process would with d times the rows. Data ranks have as
many rows each, or each its own number of them, as unlike devices do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from autopar.runtime.data.epochs import (
    Dealing,
    Epochs,
    LastRows,
    RowCounts,
    each_rank,
    epochs_of,
    part_of_rows,
    rows_of_rank,
    share_of,
)
from autopar.runtime.data.row_faults import columns_of
from autopar.runtime.data.rows import (
    Collate,
    Collated,
    RawRows,
    Row,
    RowPlace,
    built_collate,
    few,
    is_streamed,
    row_of,
    rows_like,
    stacked,
    tell,
    told_of_row,
)
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.randomness import kept_numbers, mixed_seed, seed_numbers, seeded
from autopar.runtime.ranks.refusal import refusals_of_workers, refuse
from autopar.runtime.ranks.transport import agreed, check_same_length
from autopar.runtime.ranks.user_code import told
from autopar.runtime.tensor.slices import cut, gather_along

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


class StreamStack:
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


Batch = dict[str, Tensor]
Weighed: TypeAlias = tuple[Batch, Tensor]  # a microbatch and the weight of its loss
Example: TypeAlias = Callable[[int], Mapping[str, Any]]


class RankRows(Sampler[list[RowPlace]]):
    """The places of this data rank's microbatches, shuffled anew in each epoch.

    Of its microbatches a rank reads the part `read`. The first `skip` rows are not read.
    """

    def __init__(
        self, length: int, dealing: Dealing, epochs: Epochs, *, read: slice, seed: int, skip: int
    ) -> None:
        self.length, self.dealing, self.epochs = length, dealing, epochs
        self.read, self.seed, self.skip = read, seed, skip

    def __iter__(self) -> Iterator[list[RowPlace]]:
        """Yield the places of one microbatch after another, without end."""
        for places in self.dealing.dealt(self._all_rows(), self.epochs, self.skip):
            yield places[self.read]

    def _all_rows(self) -> Iterator[RowPlace]:
        first, begin = divmod(self.skip, self.length)
        for epoch in count(first):
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
            yield from (RowPlace(epoch, index) for index in order[begin:])
            begin = 0


def read_dataset(new_dataset: Callable[[], Any], options: Namespace, mesh: Mesh) -> Any:
    """Return the dataset of the model file; None where the rows are those of an example batch."""
    if options.data == "synthetic" or mesh.is_dry_run:
        return None
    with seeded(options.seed), told("build_dataset() of the model file"):
        dataset = new_dataset()
    if not is_streamed(dataset):
        check_same_length(len(dataset), "build_dataset", mesh)
    return dataset


def read_batches(
    example_batch: Example,
    options: Namespace,
    mesh: Mesh,
    *,
    rows: tuple[int, RowCounts],
    dataset: Any = None,
    new_collate: Callable[[], Collate] | None = None,
    skip: int = 0,
    rows_over: Axis = ALONE,
    fewest: int = 1,
    repeats: bool = True,
) -> Iterator[Weighed]:
    """Yield this rank's microbatches, of a dataset or of one example batch, with their weights.

    `rows` are how many microbatches a step has, and how many rows each of them. One with fewer, at
    the end of an epoch, has to have the `fewest`; of one that has none of its own, rows that are
    there to keep ranks alike count 0, where the model `repeats` rows without harm. A weight is that
    of a mean over rows: the average of the weighed losses over ranks is the mean of the step.
    """
    microbatches, microbatch = rows
    dealing = Dealing(
        each=tuple(each_rank(microbatch, mesh.data)),
        rank=mesh.data.rank,
        microbatches=microbatches,
        fewest=fewest,
        repeats=repeats,
    )
    epochs = epochs_of(dataset, options, dealing.per_step)
    if dataset is None:
        read = synthetic_batches(
            example_batch, mesh, rows=rows, seed=options.seed, rows_over=rows_over
        )
    else:
        read = dataset_batches(
            dataset,
            example_batch,
            mesh,
            dealing=dealing,
            epochs=epochs,
            seed=options.seed,
            skip=skip,
            workers=options.workers,
            rows_over=rows_over,
            new_collate=new_collate,
        )
    return zip(read, _weights(dealing.parts(epochs, skip), mesh.device), strict=False)


def _weights(parts: Iterator[float], device: torch.device) -> Iterator[Tensor]:
    """Yield weights as tensors: few numbers, each of which is moved to the device once."""
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

    A training that goes on skips the rows that it has seen: where they have numbers, unread.
    `workers` are processes that read ahead; without any, rows are read when they are needed. Ranks
    of `rows_over` read a share of the rows each, or share what a collate has made of all of them.
    """
    for left in epochs.last_steps(skip):
        dealing.check(left)
    with seeded(seed):
        collate = built_collate(new_collate) if new_collate is not None else None
    rows = _OwnRows(
        dataset=dataset,
        example=example_of(example_batch, dealing.size, seed),
        mesh=mesh,
        dealing=dealing,
        epochs=epochs,
        share=share_of(dealing.size, rows_over),
        seed=seed,
        skip=skip,
    )
    read = _streamed if is_streamed(dataset) else _listed
    loader = read(rows, collate, workers)
    sharers = (mesh.pipeline,) if rows_over.size > 1 else (mesh.tensor, mesh.pipeline)
    return agreed(_read(mesh.reading.timed(iter(loader))), sharers, mesh.device)


def _read(loaded: Iterator[Batch]) -> Iterator[Batch]:
    """Yield what a loader reads; the caller has begun it, for that draws a number."""
    with refusals_of_workers():
        yield from loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnRows:
    """What a loader is made of: a dataset, and which of its rows are this rank's."""

    dataset: Any
    example: Batch
    mesh: Mesh
    dealing: Dealing
    epochs: Epochs
    share: slice  # the rows of its microbatches that this rank reads
    seed: int
    skip: int  # rows of all data ranks together


def _listed(of: _OwnRows, collate: Collate | None, workers: int) -> DataLoader[Any]:
    """Read rows by their numbers."""
    listed: RawRows
    batch_of: Callable[[list[Any]], Batch]
    at_once = of.dealing.block if of.epochs.last is not LastRows.PAD else 0
    if collate is None:
        listed = rows_like(of.dataset, of.example, of.mesh, at_once=at_once, seed=of.seed)
        read, batch_of = of.share, stacked
    else:  # rows are as long as the longest of their microbatch: a share of them has to be, too
        tell(few(of.dataset, at_once), of.mesh)
        listed, read = RawRows(of.dataset, seed=of.seed), slice(None)
        batch_of = Collated(collate, columns_of(of.example), of.share, seed=of.seed)
    places = RankRows(len(of.dataset), of.dealing, of.epochs, read=read, seed=of.seed, skip=of.skip)
    return DataLoader(
        listed,
        batch_sampler=places,
        collate_fn=batch_of,
        num_workers=workers,
        pin_memory=of.mesh.device.type == "cuda",
    )


def _streamed(of: _OwnRows, collate: Collate | None, workers: int) -> DataLoader[Any]:
    """Read rows in the order in which they come; one process alone can do so ahead."""
    batch_of = (
        StreamStack(of.dataset, of.example, of.share)
        if collate is None
        else Collated(collate, columns_of(of.example), of.share, seed=of.seed)
    )
    rows = StreamedRows(of.dataset, batch_of, of.dealing, of.epochs, seed=of.seed, skip=of.skip)
    is_pinned = of.mesh.device.type == "cuda"
    return DataLoader(rows, batch_size=None, num_workers=min(workers, 1), pin_memory=is_pinned)


def synthetic_batches(
    example_batch: Example,
    mesh: Mesh,
    *,
    rows: tuple[int, RowCounts],
    seed: int,
    rows_over: Axis = ALONE,
) -> Iterator[Batch]:
    """Yield this rank's microbatches of one example batch, the same in every step.

    `rows` are how many microbatches a step has, and how many rows each of them, of which ranks of
    `rows_over` have a share each. As those of a loader each is a tensor of its own: a model may
    write to it.
    """
    microbatches, microbatch = rows
    each = each_rank(microbatch, mesh.data)
    block = sum(each)
    share = part_of_rows(rows_of_rank(each, mesh.data), share_of(each[mesh.data.rank], rows_over))
    whole = example_of(example_batch, microbatches * block, seed)
    tensors = {key: value.contiguous() for key, value in whole.items()}  # as loaders lay rows out
    own = [
        {key: value[start : start + block][share] for key, value in tensors.items()}
        for start in range(0, microbatches * block, block)
    ]
    while True:
        yield from ({key: value.clone() for key, value in one.items()} for one in own)


def gathered_rows(batch: Batch, own: Collection[str], axis: Axis, *, rows: int) -> Batch:
    """Return a batch with all rows of a microbatch, but of what each rank of an axis needs its own.

    Ranks have read their shares: one message for each other key, of numbers that are few as a rule.
    """
    if axis.size == 1:
        return batch
    held = cut(((rows, 1),), axis.size)
    return {
        key: value if key in own else gather_along(value, 0, held, axis)
        for key, value in batch.items()
    }


def example_of(example_batch: Example, rows: int, seed: int) -> Batch:
    """Return the tensors of an example batch."""
    with seeded(seed):
        whole = example_batch(rows)
    return {key: value for key, value in whole.items() if isinstance(value, Tensor)}


def to_device(batch: Batch, mesh: Mesh, dtype: torch.dtype) -> Batch:
    """Return a batch on this process' device, in fp64 or fp32 what a training in those needs so."""
    return {
        key: value.to(mesh.device, _wide_enough(value.dtype, dtype), non_blocking=True)
        for key, value in batch.items()
    }


def _wide_enough(own: torch.dtype, training: torch.dtype) -> torch.dtype:
    """Return the type of a tensor of the batch: modules in 16 bits cast what they get."""
    is_narrow = own.is_floating_point and own.itemsize < training.itemsize
    return training if is_narrow else own
