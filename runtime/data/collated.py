"""Turns rows into one batch: stacked where they are alike, or by the collate of the model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import default_collate

from autopar.runtime.data.row_faults import Column, fault_of_batch, is_same_kind
from autopar.runtime.ranks.randomness import kept_numbers, mixed_seed, seed_numbers
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.user_code import told

Row: TypeAlias = dict[str, Tensor]
Collate: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]


def stacked(rows: list[Row]) -> Row:
    """Return rows as one batch; leaves where they are of several shapes."""
    first = rows[0]
    for key, value in first.items():
        other = next((row[key] for row in rows if row[key].shape != value.shape), None)
        if other is not None:
            shapes = sorted((list(value.shape), list(other.shape)))  # as other ranks say it
            refuse(
                f"{key!r} is {shapes[0]} in one row of the dataset and {shapes[1]} in another",
                fix="pad them in build_collate() of the model file, or let __getitem__ pad or cut "
                "all rows to the shape that example_batch has",
            )
    batch: Row = default_collate(rows)
    return batch


def built_collate(new_collate: Callable[[], Any]) -> Collate:
    """Return the collate of the model file; leaves where that gives none."""
    with told("build_collate() of the model file"):
        collate: Collate = new_collate()
    if not callable(collate):
        refuse(
            f"build_collate() of the model file returns a {type(collate).__name__}",
            fix="return a function that makes a batch of a list of rows",
        )
    return collate


class Collated:
    """Calls the model file's own collate on rows, and takes of its batch what the model is given.

    What it draws (masks, say) follows from the seed and the place of the first row, as with rows.
    """

    def __init__(
        self, collate: Collate, columns: Mapping[str, Column], own: slice, *, seed: int
    ) -> None:
        self.collate, self.columns, self.own, self.seed = collate, dict(columns), own, seed

    def __call__(self, placed: Sequence[tuple[tuple[int, int], Any]]) -> Row:
        """Return a batch of rows that stand beside their places."""
        rows = [row for _, row in placed]
        with kept_numbers():
            seed_numbers(mixed_seed(self.seed, *placed[0][0], 1))
            with told("build_collate()'s function"):
                batch = self.collate(rows)
        fault = fault_of_batch(batch, self.columns, len(rows))
        if fault is not None:
            refuse(fault.found, fix=fault.fix)
        columns = {key: as_column(batch[key], one.dtype) for key, one in self.columns.items()}
        return {key: value[self.own] for key, value in apart(columns).items()}


def apart(columns: Row) -> Row:
    """Return columns of which no two share memory: a model may write to one of them.

    A collate may give one tensor under two keys, or two views of one.
    """
    apart_ones: Row = {}
    for key, value in columns.items():
        others = (columns[other] for other in columns if other != key)
        is_shared = any(_overlap(value, other) for other in others)
        apart_ones[key] = value.clone() if is_shared else value
    return apart_ones


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors overlaps."""
    memory = [each.untyped_storage() for each in (one, other)]
    last_begin = max(each.data_ptr() for each in memory)
    return last_begin < min(each.data_ptr() + each.nbytes() for each in memory)


def as_column(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a value as a tensor of a column's type, where both are of one kind."""
    tensor = torch.as_tensor(value)
    return tensor.to(dtype) if is_same_kind(tensor, dtype) else tensor
