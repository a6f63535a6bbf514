"""Turns a dataset, or an example batch, into the microbatches of one data rank.

Step s takes rows s·G to (s+1)·G − 1 of one endless sequence, where G is the global batch: the rows
of a step are the same under every plan. Within a step, microbatch m of all data ranks together is
one block of it, so a plan with d data ranks trains on what one process would with d times the rows.
Data ranks have as many rows each, or each its own number of them, as unlike devices do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from autopar.runtime.agreement import agreed
from autopar.runtime.cuts import cut
from autopar.runtime.dataset_rows import Place, batch_of, rows_like
from autopar.runtime.mesh import ALONE, Axis, Mesh
from autopar.runtime.randomness import mixed_seed, seeded
from autopar.runtime.slices import gather_along

Batch = dict[str, Tensor]
Example: TypeAlias = Callable[[int], Mapping[str, Any]]
Rows: TypeAlias = int | Sequence[int]  # of a microbatch: on every data rank, or on each its own


class RankRows(Sampler[list[Place]]):
    """The places of this data rank's microbatches, shuffled anew each time through the data.

    The rows that are left at the end of one time through fill up a batch with the next. Of each
    block of so many rows `own` are those that this rank reads.
    """

    def __init__(self, dataset: Dataset[Any], *, block: int, own: slice, seed: int) -> None:
        self.length = len(dataset)  # type: ignore[arg-type]  # which is checked before
        self.block, self.own, self.seed = block, own, seed

    def __iter__(self) -> Iterator[list[Place]]:
        """Yield the places of one microbatch after another, without end."""
        rows = self._all_rows()
        while True:
            yield [next(rows) for _ in range(self.block)][self.own]

    def _all_rows(self) -> Iterator[Place]:
        for epoch in count():
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order = torch.randperm(self.length, generator=generator).tolist()
            yield from (Place(epoch, index) for index in order)


def dataset_batches(
    new_dataset: Callable[[], Dataset[Any]],
    example_batch: Example,
    mesh: Mesh,
    *,
    microbatch: Rows,
    seed: int,
    workers: int = 0,
    rows_over: Axis = ALONE,
) -> Iterator[Batch]:
    """Yield this rank's microbatches of a dataset, without end, with the keys of the example.

    `workers` are processes that read ahead; without any, rows are read when they are needed. Ranks
    of `rows_over` read a share of the rows each.
    """
    with seeded(seed):
        dataset = new_dataset()
    each = _each_rank(microbatch, mesh.data)
    example = _example(example_batch, each[mesh.data.rank], seed)
    rows = rows_like(dataset, example, mesh, at_once=sum(each), seed=seed)
    own = _own_rows(each, mesh.data, rows_over)
    places = RankRows(rows, block=sum(each), own=own, seed=seed)
    is_pinned = mesh.device.type == "cuda"
    loader = DataLoader(
        rows,
        batch_sampler=places,
        collate_fn=batch_of,
        num_workers=workers,
        pin_memory=is_pinned,
    )
    sharers = (mesh.pipeline,) if rows_over.size > 1 else (mesh.tensor, mesh.pipeline)
    return agreed(iter(loader), sharers, mesh.device)


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
    each = _each_rank(microbatch, mesh.data)
    block, share = sum(each), _own_rows(each, mesh.data, rows_over)
    whole = _example(example_batch, microbatches * block, seed)
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
    held = cut(((rows, 1),), axis.size)
    return {
        key: value if key in own else gather_along(value, 0, held, axis)
        for key, value in batch.items()
    }


def _each_rank(rows: Rows, data: Axis) -> Sequence[int]:
    """Return the rows of a microbatch of each data rank."""
    return [rows] * data.size if isinstance(rows, int) else rows


def _own_rows(each: Sequence[int], data: Axis, axis: Axis) -> slice:
    """Return which rows of a block this data rank reads, of which ranks of an axis share."""
    before = sum(each[: data.rank])
    first, stop = cut(((each[data.rank], 1),), axis.size).ranges[axis.rank][0]
    return slice(before + first, before + stop)


def _example(example_batch: Example, rows: int, seed: int) -> Batch:
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
