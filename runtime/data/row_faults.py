"""Explains why a dataset, its length or a row does not fit the plan, or differs between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Axis, Mesh
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.ranks.transport import differing, gathered
from autopar.runtime.ranks.user_code import place_of

MOST_ROWS = 10**9  # their order is shuffled in memory


class Fault(NamedTuple):
    """A fault in a row or dataset, and how to fix it."""

    found: str
    fix: str


class RowColumn(NamedTuple):
    """The expected shape and dtype of one entry of a row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def columns_of(example: Mapping[str, Any]) -> dict[str, RowColumn]:
    """Return the entries that a row must have: one for each tensor of an example batch."""
    tensors = {key: value for key, value in example.items() if isinstance(value, Tensor)}
    return {key: RowColumn(value.dtype, tuple(value.shape[1:])) for key, value in tensors.items()}


def fault_of_row(
    row: Any, columns: Mapping[str, RowColumn], dataset: Any, *, name: str = ""
) -> Fault | None:
    """Return why a row does not fit the plan, or None."""
    name = name or f"a row of the dataset ({type(dataset).__name__})"
    maker = _at(dataset, "__getitem__", "__iter__")
    fix = f"let {maker} give dicts with the keys of example_batch: {', '.join(columns)}"
    if not isinstance(row, Mapping):
        return Fault(f"{name} is a {type(row).__name__}", fix)
    missing = [key for key in columns if key not in row]
    if missing:
        return Fault(f"{name} has {', '.join(map(str, row))}, but no {', '.join(missing)}", fix)
    for key, planned in columns.items():
        if not is_number(row[key]):
            return Fault(
                f"{key!r} in {name} is a {type(row[key]).__name__}, which is no tensor",
                f"let {maker} give tensors, arrays or numbers, of one shape in all rows",
            )
        found = torch.as_tensor(row[key])
        if found.ndim != len(planned.shape) or not is_same_kind(found, planned.dtype):
            own = RowColumn(found.dtype, tuple(found.shape))
            return Fault(
                f"{key!r} is {own} in {name}, and the plan was made for {planned}",
                f"make them agree: change {maker}, or change example_batch and plan again",
            )
    return None


def fault_of_batch(batch: Any, columns: Mapping[str, RowColumn], rows: int) -> Fault | None:
    """Return why a collated batch of `rows` rows does not fit the plan, or None."""
    fix = (
        f"let it return a dict with the keys of example_batch ({', '.join(columns)}), rows as "
        "dimension 0"
    )
    if not isinstance(batch, Mapping):
        return Fault(f"build_collate() makes a {type(batch).__name__} of rows", fix)
    for key in columns:
        if key not in batch:
            keys = ", ".join(map(str, batch))
            return Fault(f"build_collate() makes batches of {keys}, not {key}", fix)
        if not is_number(batch[key]):
            kind = type(batch[key]).__name__
            return Fault(f"{key!r} of build_collate() is a {kind}, which is no tensor", fix)
    found = {key: torch.as_tensor(batch[key]) for key in columns}
    for key, tensor in found.items():
        if list(tensor.shape[:1]) != [rows]:
            shape = list(tensor.shape)
            return Fault(f"{key!r} of build_collate() is {shape} for {rows} rows", fix)
    for key, planned in columns.items():
        own = RowColumn(found[key].dtype, tuple(found[key].shape[1:]))
        if len(own.shape) != len(planned.shape) or not is_same_kind(found[key], planned.dtype):
            told = (
                f"{key!r} of build_collate() has rows of {own}, and the plan was made for {planned}"
            )
            return Fault(told, fix)
    return None


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be read in order: its rows have no index."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return hasattr(dataset, "__iter__")
    return not isinstance(dataset, Sized) and hasattr(dataset, "__iter__")


def fault_of_dataset(dataset: Any, maker: str) -> Fault | None:
    """Return why an object is no dataset or has a bad length, or None; may raise its errors."""
    name = f"the dataset ({type(dataset).__name__})"
    if isinstance(dataset, DataLoader):
        return Fault(
            f"{name} is a loader, and the script makes its own",
            "return its dataset; its collate_fn is what build_collate() of the model file returns",
        )
    if isinstance(dataset, Mapping) or not (is_stream(dataset) or hasattr(dataset, "__getitem__")):
        return Fault(
            f"{name} gives no row for an index", "give it __getitem__, or return one of its parts"
        )
    if is_stream(dataset):
        return None
    if not isinstance(dataset, Sized):
        return Fault(f"{name} has no length", "give it __len__, or __iter__ for a stream")
    return _fault_of_length(dataset, maker)


def _fault_of_length(dataset: Any, maker: str) -> Fault | None:
    """Return why a training cannot use a dataset of this length, or None."""
    length = _at(dataset, "__len__")
    try:
        rows = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:  # __len__ has no valid result
        told = f"the length of the dataset ({type(dataset).__name__}) is invalid: {error}"
        return Fault(told, f"let {length} return how many rows there are")
    if rows == 0:
        found = f"the dataset ({type(dataset).__name__}) is empty"
        return Fault(found, f"look where {maker} reads from")
    if rows > MOST_ROWS:
        found = f"{maker}() of the model file has {rows:,} rows, and {MOST_ROWS:,} are the most"
        return Fault(
            found, f"let {length} return fewer, or leave it out: rows are read by __iter__ then"
        )
    return None


def _at(dataset: Any, *methods: str) -> str:
    """Return the first of these methods that the user wrote, and its place."""
    found = ((name, place_of(getattr(type(dataset), name, None))) for name in methods)
    return next((f"{name} ({place})" for name, place in found if place), methods[0])


def is_same_kind(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor and a dtype are both floating, integer, complex or boolean."""
    return _kind(tensor.dtype) == _kind(dtype)


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def is_number(value: Any) -> bool:
    """Whether torch.as_tensor accepts a value."""
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def agreed(
    batches: Iterator[dict[str, Tensor]], rows_over: Axis, mesh: Mesh
) -> Iterator[dict[str, Tensor]]:
    """Yield batches, after checking that ranks which share rows have read the same first batch.

    In a pipeline, one rank reads a row's inputs and another its targets. Tensor ranks share the
    work on a row, unless each rank of `rows_over` reads different rows. If a dataset drew different
    random numbers on each rank, the ranks would mix different versions of a row.
    """
    first = next(batches)
    for axis in (mesh.pipeline,) if rows_over.size > 1 else (mesh.tensor, mesh.pipeline):
        _check(first, axis, mesh)
    yield first
    yield from batches


def check_same_length(rows: int, maker: str, mesh: Mesh) -> None:
    """Exit if ranks have datasets of different lengths."""
    if mesh.world.size == 1:
        return
    own = torch.tensor([rows], device=mesh.device)
    every: list[int] = gathered(own, mesh.world).flatten().tolist()
    for rank, other in enumerate(every):
        if other != every[0]:
            refuse(
                f"{maker}() returns {every[0]:,} rows on rank 0 and {other:,} on rank {rank}",
                fix="let it return the same rows on all ranks: each takes its own share of them",
            )


def _check(batch: Mapping[str, Tensor], axis: Axis, mesh: Mesh) -> None:
    keys, found = list(batch), differing([_digest(value) for value in batch.values()], axis, mesh)
    if found:
        others = ", ".join(repr(keys[index]) for index in found)
        refuse(
            f"ranks that train on the same rows have read different ones: {others} of their first "
            "batch differ",
            fix="let the dataset draw from torch's, Python's or numpy's own generator, which are "
            "seeded for every row, or from one that it seeds by the number of the row",
        )


def _digest(value: Tensor) -> int:
    """Return a digest of a batch's rows that depends on their order."""
    plain = torch.view_as_real(value) if value.is_complex() else value
    return mixed_seed(*torch.hash_tensor(plain.reshape(len(plain), -1), dim=1).tolist())
