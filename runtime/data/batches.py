"""Turns a dataset, or an example batch, into the microbatches of one data rank.

Step s takes rows s·G to (s+1)·G − 1 of one endless sequence, where G is the global batch: the rows
of a step are the same under every plan. Within a step, microbatch m of all data ranks together is
one block of it, so a plan with d data ranks trains on what one process would with d times the rows.
Data ranks have as many rows each, or each its own number of them, as unlike devices do.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from autopar.runtime.data.collated import Collate, Collated, built_collate, stacked
from autopar.runtime.data.dataset_rows import (
    Place,
    RawRows,
    columns_of,
    few,
    is_streamed,
    rows_like,
    tell,
)
from autopar.runtime.data.streamed_rows import Alike, StreamedRows
from autopar.runtime.ranks.agreement import agreed, check_same_length
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.randomness import mixed_seed, seeded
from autopar.runtime.ranks.refusal import refusals_of_workers
from autopar.runtime.ranks.user_code import told
from autopar.runtime.tensor.cuts import cut
from autopar.runtime.tensor.slices import gather_along

Batch = dict[str, Tensor]
Example: TypeAlias = Callable[[int], Mapping[str, Any]]
Rows: TypeAlias = int | Sequence[int]  # of a microbatch: on every data rank, or on each its own


class RankRows(Sampler[list[Place]]):
    """The places of this data rank's microbatches, shuffled anew each time through the data.

    The rows that are left at the end of one time through fill up a batch with the next. Of each
    block of so many rows `own` are those that this rank reads. The first `skip` rows are not read.
    """

    def __init__(
        self, dataset: Dataset[Any], *, block: int, own: slice, seed: int, skip: int = 0
    ) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]  # which is checked before
        self.block, self.own, self.seed, self.skip = block, own, seed, skip

    def __iter__(self) -> Iterator[list[Place]]:
        """Yield the places of one microbatch after another, without end."""
        rows = self._all_rows()
        while True:
            yield [next(rows) for _ in range(self.block)][self.own]

    def _all_rows(self) -> Iterator[Place]:
        first, begin = divmod(self.skip, self.length)
        for epoch in count(first):
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
            yield from (Place(epoch, index) for index in order[begin:])
            begin = 0


def read_batches(
    example_batch: Example,
    options: Namespace,
    mesh: Mesh,
    *,
    rows: tuple[int, Rows],
    new_dataset: Callable[[], Any] | None = None,
    new_collate: Callable[[], Collate] | None = None,
    skip: int = 0,
    rows_over: Axis = ALONE,
) -> Iterator[Batch]:
    """Yield this rank's microbatches: of the dataset, or of one example batch where none is wanted.

    `rows` are how many microbatches a step has, and how many rows each of them.
    """
    if new_dataset is None or options.data == "synthetic" or mesh.is_dry_run:
        return synthetic_batches(
            example_batch, mesh, rows=rows, seed=options.seed, rows_over=rows_over
        )
    return dataset_batches(
        new_dataset,
        example_batch,
        mesh,
        microbatch=rows[1],
        seed=options.seed,
        skip=skip,
        workers=options.workers,
        rows_over=rows_over,
        new_collate=new_collate,
    )


def dataset_batches(
    new_dataset: Callable[[], Any],
    example_batch: Example,
    mesh: Mesh,
    *,
    microbatch: Rows,
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
    with seeded(seed):
        with told("build_dataset() of the model file"):
            dataset = new_dataset()
        collate = built_collate(new_collate) if new_collate is not None else None
    each = each_rank(microbatch, mesh.data)
    share = share_of(each[mesh.data.rank], rows_over)
    rows = _OwnRows(
        dataset=dataset,
        example=example_of(example_batch, each[mesh.data.rank], seed),
        mesh=mesh,
        block=sum(each),
        of_rank=_of_rank(each, mesh.data),
        share=share,
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
    block: int  # rows of all data ranks together
    of_rank: slice  # the rows of a block that this data rank trains on
    share: slice  # the rows of those that this rank reads
    seed: int
    skip: int  # rows of all data ranks together

    @property
    def read(self) -> slice:
        """The rows of a block that this rank reads."""
        return _part(self.of_rank, self.share)


def _listed(of: _OwnRows, collate: Collate | None, workers: int) -> DataLoader[Any]:
    """Read rows by their numbers."""
    check_same_length(len(of.dataset), "build_dataset", of.mesh)
    listed: RawRows
    batch_of: Callable[[list[Any]], Batch]
    if collate is None:
        listed = rows_like(of.dataset, of.example, of.mesh, at_once=of.block, seed=of.seed)
        read, batch_of = of.read, stacked
    else:  # rows are as long as the longest of their microbatch: a share of them has to be, too
        tell(few(of.dataset, of.block), of.mesh)
        listed, read = RawRows(of.dataset, seed=of.seed), of.of_rank
        batch_of = Collated(collate, columns_of(of.example), of.share, seed=of.seed)
    return DataLoader(
        listed,
        batch_sampler=RankRows(of.dataset, block=of.block, own=read, seed=of.seed, skip=of.skip),
        collate_fn=batch_of,
        num_workers=workers,
        pin_memory=of.mesh.device.type == "cuda",
    )


def _streamed(of: _OwnRows, collate: Collate | None, workers: int) -> DataLoader[Any]:
    """Read rows in the order in which they come; one process alone can do so ahead."""
    batch_of = (
        Alike(of.dataset, of.example, of.share)
        if collate is None
        else Collated(collate, columns_of(of.example), of.share, seed=of.seed)
    )
    rows = StreamedRows(
        of.dataset, batch_of, block=of.block, own=of.of_rank, seed=of.seed, skip=of.skip
    )
    is_pinned = of.mesh.device.type == "cuda"
    return DataLoader(rows, batch_size=None, num_workers=min(workers, 1), pin_memory=is_pinned)


def synthetic_batches(
    example_batch: Example,
    mesh: Mesh,
    *,
    rows: tuple[int, Rows],
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
    share = _part(_of_rank(each, mesh.data), share_of(each[mesh.data.rank], rows_over))
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


def each_rank(rows: Rows, data: Axis) -> Sequence[int]:
    """Return the rows of a microbatch of each data rank."""
    return [rows] * data.size if isinstance(rows, int) else rows


def _of_rank(each: Sequence[int], data: Axis) -> slice:
    """Return which rows of a block are of this data rank."""
    before = sum(each[: data.rank])
    return slice(before, before + each[data.rank])


def _part(rows: slice, share: slice) -> slice:
    """Return a share of some rows of a block."""
    return slice(rows.start + share.start, rows.start + share.stop)


def share_of(rows: int, axis: Axis) -> slice:
    """Return which of so many rows this rank of an axis has."""
    return slice(*cut(((rows, 1),), axis.size).ranges[axis.rank][0])


def example_of(example_batch: Example, rows: int, seed: int) -> Batch:
    """Return the tensors of an example batch."""
    with seeded(seed):
        whole = example_batch(rows)
    return {key: value for key, value in whole.items() if isinstance(value, Tensor)}


def placed(batch: Batch, mesh: Mesh, dtype: torch.dtype) -> Batch:
    """Return a batch on this process' device, in fp64 or fp32 what a training in those needs so."""
    return {
        key: value.to(mesh.device, _wide_enough(value.dtype, dtype), non_blocking=True)
        for key, value in batch.items()
    }


def _wide_enough(own: torch.dtype, training: torch.dtype) -> torch.dtype:
    """Return the type of a tensor of the batch: modules in 16 bits cast what they get."""
    is_narrow = own.is_floating_point and own.itemsize < training.itemsize
    return training if is_narrow else own
