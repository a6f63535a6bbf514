"""Reads the rows of a training as plain PyTorch does, in the order that scripts have them in.

What the order and the draws of a dataset follow from is the seed: the rows of an epoch are a
permutation, and what a dataset draws for a row follows from its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from autopar.planner.model.model_file import ModelFile
from autopar.runtime.data.batches import dataset_batches
from autopar.runtime.data.epochs import Epochs
from autopar.runtime.data.shares import Dealing
from autopar.runtime.ranks.mesh import start, stop
from autopar.runtime.ranks.randomness import kept_numbers, mixed_seed, seed_numbers, seeded

Batch: TypeAlias = dict[str, Tensor]


def plain_batches(file: ModelFile, *, rows: int, seed: int, uses_dataset: bool) -> Iterator[Batch]:
    """Yield global batches without end; two keys of a batch are two tensors."""
    with seeded(seed):
        found = file.example_batch(rows)
    example = {key: one for key, one in found.items() if isinstance(one, Tensor)}
    if file.build_dataset is None or not uses_dataset:
        while True:
            yield {key: one.clone() for key, one in example.items()}
    with seeded(seed):
        dataset = file.build_dataset()
    is_listed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if is_listed and file.build_collate is None and not hasattr(dataset, "__getitems__"):
        places = _places(len(dataset), seed)
        while True:
            chosen = [_row(dataset, example, place, seed) for place in islice(places, rows)]
            yield {key: one.clone() for key, one in default_collate(chosen).items()}
    yield from _as_scripts_do(file, dataset, rows, seed)


def _places(length: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the epoch and the number of one row after another."""
    for epoch in count():
        numbers = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        for row in torch.randperm(length, generator=numbers).tolist():
            yield epoch, row


def _row(
    dataset: Any, example: Mapping[str, Tensor], place: tuple[int, int], seed: int
) -> Mapping[str, Tensor]:
    """Return what the model is given of a row, in the types of the example."""
    with kept_numbers():
        seed_numbers(mixed_seed(seed, *place))
        row = dataset[place[1]]
    return {key: torch.as_tensor(row[key], dtype=one.dtype) for key, one in example.items()}


def _as_scripts_do(file: ModelFile, dataset: Any, rows: int, seed: int) -> Iterator[Batch]:
    """Read rows that come in a stream, or go through a collate, by the code of scripts."""
    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        yield from dataset_batches(
            dataset,
            file.example_batch,
            mesh,
            dealing=Dealing(each=(rows,), rank=0),
            epochs=Epochs(rows=None, per_step=rows),
            seed=seed,
            new_collate=file.build_collate,
        )
    finally:
        stop(mesh)
