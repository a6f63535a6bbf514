"""Turns rows of a dataset into batches on a device: reads, checks, collates and moves them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from autopar.runtime.data.row_faults import (
    RowColumn,
    columns_of,
    fault_of_batch,
    fault_of_dataset,
    fault_of_row,
    is_number,
    is_same_kind,
    is_stream,
)
from autopar.runtime.ranks.leaving import refuse
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import (
    cpu_generators_restored,
    mixed_seed,
    seed_cpu_generators,
    seeded,
)
from autopar.runtime.ranks.user_code import exit_on_error

Row: TypeAlias = dict[str, Tensor]
Collate: TypeAlias = Callable[[list[Any]], Mapping[str, Any]]


def stacked(rows: list[Row]) -> Row:
    """Return rows as one batch; exit if their shapes differ."""
    first = rows[0]
    for key, value in first.items():
        other = next((row[key] for row in rows if row[key].shape != value.shape), None)
        if other is not None:
            # sorted, so that all ranks print the same
            shapes = sorted((list(value.shape), list(other.shape)))
            refuse(
                f"{key!r} is {shapes[0]} in one row of the dataset and {shapes[1]} in another",
                fix="pad them in build_collate() of the model file, or let __getitem__ pad or cut "
                "all rows to the shape that example_batch has",
            )
    batch: Row = default_collate(rows)
    return batch


def built_collate(new_collate: Callable[[], Any] | None, seed: int) -> Collate | None:
    """Return the collate function of the model file, if any; exit if it is not callable."""
    if new_collate is None:
        return None
    with seeded(seed), exit_on_error("build_collate() of the model file"):
        collate: Collate = new_collate()
    if not callable(collate):
        refuse(
            f"build_collate() of the model file returns a {type(collate).__name__}",
            fix="return a function that makes a batch of a list of rows",
        )
    return collate


class Collated:
    """Calls the model file's collate function, and takes the model's inputs from its batch.

    Random numbers that the function draws (masks, say) depend on the seed and the first row's
    position.
    """

    def __init__(
        self, collate: Collate, columns: Mapping[str, RowColumn], own: slice, *, seed: int
    ) -> None:
        self.collate, self.columns, self.own, self.seed = collate, dict(columns), own, seed

    def __call__(self, placed: Sequence[tuple[tuple[int, int], Any]]) -> Row:
        """Return a batch of rows; each row comes with its position."""
        rows = [row for _, row in placed]
        with cpu_generators_restored():
            seed_cpu_generators(mixed_seed(self.seed, *placed[0][0], 1))
            with exit_on_error("build_collate()'s function"):
                batch = self.collate(rows)
        fault = fault_of_batch(batch, self.columns, len(rows))
        if fault is not None:
            refuse(fault.found, fix=fault.fix)
        columns = {key: as_column(batch[key], one.dtype) for key, one in self.columns.items()}
        return {key: value[self.own] for key, value in apart(columns).items()}


def apart(columns: Row) -> Row:
    """Return the columns without shared memory, because a model may write to them.

    A collate function may return the same tensor under two keys, or two views of a tensor.
    """
    found: Row = {}
    for key, value in columns.items():
        others = (columns[other] for other in columns if other != key)
        is_shared = any(_overlap(value, other) for other in others)
        found[key] = value.clone() if is_shared else value
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors overlaps."""
    memory = [each.untyped_storage() for each in (one, other)]
    last_begin = max(each.data_ptr() for each in memory)
    return last_begin < min(each.data_ptr() + each.nbytes() for each in memory)


def as_column(value: Any, dtype: torch.dtype) -> Tensor:
    """Return a value as a tensor with a column's dtype, if both are of the same kind."""
    tensor = torch.as_tensor(value)
    return tensor.to(dtype) if is_same_kind(tensor, dtype) else tensor


class RowPlace(NamedTuple):
    """The position of a row: the epoch, and the row's index."""

    epoch: int
    row: int


class RawRows(Dataset[Any]):
    """The rows of a dataset, unchanged, with their positions, for a collate function.

    Random numbers drawn for a row (a crop, a window, a mask) depend on its position alone, so all
    ranks and all plans read the same row. If a dataset reads several rows in one call, the first
    row's position seeds all of them.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.reads_at_once = _reads_at_once(dataset)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.dataset)

    def __getitem__(self, place: RowPlace) -> Any:
        """Return one row."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[RowPlace]) -> list[Any]:
        """Return several rows, in one call if the dataset supports it."""
        with cpu_generators_restored():
            if self.reads_at_once:
                self._seed_by(places[0])
                with exit_on_row_error(self.dataset):
                    found = self.dataset.__getitems__([place.row for place in places])
                return list(map(self.made, places, found))
            return [self._read(place) for place in places]

    def made(self, place: RowPlace, row: Any) -> Any:
        """Return a row in the form that the loader's collate function takes."""
        return place, row

    def _read(self, place: RowPlace) -> Any:
        self._seed_by(place)
        with exit_on_row_error(self.dataset):
            row = self.dataset[place.row]
        return self.made(place, row)

    def _seed_by(self, place: RowPlace) -> None:
        seed_cpu_generators(mixed_seed(self.seed, *place))


class DatasetRows(RawRows):
    """The rows of a dataset as tensors, with only the columns that the model takes.

    Lists and numbers become tensors, because torch's collate would treat a list as several columns.
    All tensors are cast to the example's dtypes.
    """

    def __init__(self, dataset: Any, columns: Mapping[str, RowColumn], *, seed: int) -> None:
        super().__init__(dataset, seed=seed)
        self.columns = dict(columns)

    def made(self, place: RowPlace, row: Mapping[str, Any]) -> Row:
        """Return the columns of a row."""
        del place
        return row_of(row, self.columns, self.dataset)


def row_of(row: Any, columns: Mapping[str, RowColumn], dataset: Any) -> Row:
    """Return some columns of a row as tensors; exit if the row does not fit the plan."""
    found: Row = {}
    try:
        for name, planned in columns.items():
            found[name] = as_column(row[name], planned.dtype)
            if found[name].dtype != planned.dtype or found[name].ndim != len(planned.shape):
                raise TypeError(name)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
        check_row(row, columns, dataset)
        raise
    return found


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset reads several rows in one call; a Subset does if its own dataset does."""
    if isinstance(dataset, Subset):
        return _reads_at_once(dataset.dataset)
    return hasattr(dataset, "__getitems__")


class ListedRows(NamedTuple):
    """Rows that have an index, and how a rank makes its share of a microbatch of them."""

    rows: RawRows
    batch_of: Callable[[list[Any]], Row]
    read: slice  # the part of a microbatch that the rank reads


def listed_rows(
    dataset: Dataset[Any],
    example: Mapping[str, Tensor],
    collate: Collate | None,
    share: slice,
    mesh: Mesh,
    *,
    at_once: int = 0,
    seed: int,
) -> ListedRows:
    """Return the rows of a dataset, for batches with the keys of an example batch.

    Exits if the first row does not fit, and prints what the dataset should return. Prints notes if
    this row has other shapes, or entries that the example lacks, and if the dataset has fewer rows
    than `at_once`, the number that the data ranks train on at once. A `collate` function gets rows
    unchecked, and whole microbatches, because it may pad to the longest row.
    """
    columns, notes = columns_of(example), few(dataset, at_once)
    if collate is not None:
        tell(notes, mesh)
        batch_of = Collated(collate, columns, share, seed=seed)
        return ListedRows(RawRows(dataset, seed=seed), batch_of, slice(None))
    with exit_on_row_error(dataset):
        first = dataset[0]
    check_row(first, columns, dataset)
    tell([*_notes(first, columns), *notes], mesh)
    return ListedRows(DatasetRows(dataset, columns, seed=seed), stacked, share)


def exit_on_row_error(dataset: Any) -> AbstractContextManager[None]:
    """Exit if reading a row fails; all ranks print the same message, although their rows differ."""
    return exit_on_error(f"reading a row of the dataset ({type(dataset).__name__})")


def tell(notes: Iterable[str], mesh: Mesh) -> None:
    """Print notes, once for all ranks."""
    for note in notes:
        mesh.say(f"note: {note}")


def is_streamed(dataset: Any, *, maker: str = "build_dataset") -> bool:
    """Whether a dataset can only be read in order; exit if it is not a dataset."""
    with exit_on_error(f"the length of the dataset ({type(dataset).__name__})"):
        fault = fault_of_dataset(dataset, maker)
    if fault is not None:
        refuse(fault.found, fix=fault.fix)
    return is_stream(dataset)


def check_row(row: Any, columns: Mapping[str, RowColumn], dataset: Any) -> None:
    """Exit if a row does not fit the plan."""
    fault = fault_of_row(row, columns, dataset)
    if fault is not None:
        refuse(fault.found, fix=fault.fix)


def _notes(row: Mapping[str, Any], columns: Mapping[str, RowColumn]) -> Iterator[str]:
    for key, planned in columns.items():
        tensor = torch.as_tensor(row[key])
        found = RowColumn(tensor.dtype, tuple(tensor.shape))
        if found.shape != planned.shape:
            yield (
                f"{key!r} is {found} in the dataset's rows, and the plan was made for {planned}\n"
                "  fix: let example_batch return such rows, and plan again"
            )
    left = [key for key in row if key not in columns and is_number(row[key])]
    if left:
        yield (
            f"the model is not given {', '.join(left)} of the dataset's rows, because "
            "example_batch has no such tensor\n  fix: if the model needs it, add it to "
            "example_batch, with an entry for each row, and plan again"
        )


def few(dataset: Any, at_once: int) -> Iterator[str]:
    """Yield a note if a dataset has fewer rows than are trained on at once."""
    rows = len(dataset)
    if rows < at_once:
        yield (
            f"the dataset has {rows} rows, fewer than the {at_once} that are trained on at once: "
            "some are repeated within a step"
        )


def to_device(
    batch: Row, mesh: Mesh, dtype: torch.dtype, *, channels_last: Collection[str] = ()
) -> Row:
    """Return a batch on this process's device; floats get the training's dtype if it is wider.

    A GPU copies the batch on a separate stream, while it still runs earlier steps. Images named
    in `channels_last` get this memory format, which convolutions on a GPU prefer.
    """
    moved = _copied(batch, mesh.device, dtype)
    order = torch.channels_last
    for key in channels_last:
        moved[key] = moved[key].contiguous(memory_format=order)
    return moved


def _copied(batch: Row, device: torch.device, dtype: torch.dtype) -> Row:
    if device.type != "cuda":
        return {key: _moved(value, device, dtype) for key, value in batch.items()}
    copies, steps = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        moved = {k: _moved(v, device, dtype) for k, v in batch.items() if not v.is_cuda}
    steps.wait_stream(copies)
    for value in moved.values():
        value.record_stream(steps)  # so that its memory is not reused too early
    moved |= {k: _moved(v, device, dtype) for k, v in batch.items() if v.is_cuda}
    return {key: moved[key] for key in batch}


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _moved(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return value.to(device, _wide_enough(value.dtype, dtype), non_blocking=True)


def _wide_enough(own: torch.dtype, training: torch.dtype) -> torch.dtype:
    """Return the training's dtype for a narrower floating input, else the input's own.

    Inputs are not narrowed here: modules in 16 bits cast them.
    """
    is_narrow = own.is_floating_point and own.itemsize < training.itemsize
    return training if is_narrow else own
