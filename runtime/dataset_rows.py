"""Gives of a dataset's rows what a plan was made for, or says what they lack."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from autopar.runtime.mesh import Mesh
from autopar.runtime.randomness import kept_numbers, mixed_seed, seed_numbers
from autopar.runtime.refusal import refuse

Row = dict[str, Tensor]


class Place(NamedTuple):
    """Where a row stands: which time through the data it is, and the number of the row."""

    epoch: int
    row: int


class Rows(Dataset[Row]):
    """The rows of a dataset as tensors, with some of their columns: others need make no batch.

    What is a list or a number becomes a tensor, since torch makes a batch of a row's list
    otherwise. Widths of numbers become those of the columns. What the dataset draws for a row (a
    crop, a window, a mask) depends on its place alone: ranks that share rows read the same, and
    other plans do. A dataset that reads several rows at once draws for all of them by the first.
    """

    def __init__(self, dataset: Any, columns: Mapping[str, torch.dtype], *, seed: int) -> None:
        self.dataset, self.columns, self.seed = dataset, dict(columns), seed
        self.reads_at_once = _reads_at_once(dataset)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.dataset)

    def __getitem__(self, place: Place) -> Row:
        """Return one."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[Place]) -> list[Row]:
        """Return several, at once where the dataset can."""
        with kept_numbers():
            if self.reads_at_once:
                self._seed_by(places[0])
                found = self.dataset.__getitems__([place.row for place in places])
                return list(map(self._of, found))
            return [self._read(place) for place in places]

    def _read(self, place: Place) -> Row:
        self._seed_by(place)
        return self._of(self.dataset[place.row])

    def _seed_by(self, place: Place) -> None:
        seed_numbers(mixed_seed(self.seed, *place))

    def _of(self, row: Mapping[str, Any]) -> Row:
        return {name: _tensor(row[name], dtype) for name, dtype in self.columns.items()}


def batch_of(rows: list[Row]) -> Row:
    """Return rows as one batch; leaves where they are of several shapes."""
    first = rows[0]
    for key, value in first.items():
        other = next((row[key] for row in rows if row[key].shape != value.shape), None)
        if other is not None:
            refuse(
                f"{key!r} is {list(value.shape)} in one row of the dataset and "
                f"{list(other.shape)} in another",
                fix="let __getitem__ pad or cut all rows to the shape that example_batch has",
            )
    batch: Row = default_collate(rows)
    return batch


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset reads several rows at once; torch's subsets only seem to."""
    if isinstance(dataset, Subset):
        return _reads_at_once(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def rows_like(
    dataset: Dataset[Any], example: Mapping[str, Tensor], mesh: Mesh, *, at_once: int, seed: int
) -> Rows:
    """Return the rows of a dataset with the keys of an example batch.

    Leaves where there are none, or no such keys, and says what the dataset should be. What else a
    row has no model is given; numbers among it are told, and so are other shapes and kinds, and
    fewer rows than the data ranks train on at once.
    """
    name = f"the dataset ({type(dataset).__name__})"
    _check_kind(dataset, name)
    row = dataset[0]
    _check_row(row, name, example)
    notes = [*_notes(row, example), *_few(len(dataset), at_once)]  # type: ignore[arg-type]  # checked
    for note in notes if mesh.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr, flush=True)
    return Rows(dataset, {key: value.dtype for key, value in example.items()}, seed=seed)


def _check_kind(dataset: Dataset[Any], name: str) -> None:
    if not isinstance(dataset, Sized):
        refuse(f"{name} has no length", fix="give it __len__ and __getitem__: ranks take rows")
    if len(dataset) == 0:
        refuse(f"{name} is empty", fix="look where build_dataset reads from")
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__"):
        refuse(
            f"{name} gives no row for a number",
            fix="give it __getitem__, or return one part of it: the script makes its own loader",
        )


def _check_row(row: Any, name: str, example: Mapping[str, Tensor]) -> None:
    fix = f"let __getitem__ return a dict with the keys of example_batch: {', '.join(example)}"
    if not isinstance(row, Mapping):
        refuse(f"a row of {name} is a {type(row).__name__}", fix=fix)
    missing = [key for key in example if key not in row]
    if missing:
        refuse(f"a row of {name} has {', '.join(row)}, but no {', '.join(missing)}", fix=fix)
    for key in example:
        if not _is_number(row[key]):
            refuse(
                f"{key!r} in a row of {name} is a {type(row[key]).__name__}, which is no tensor",
                fix="let __getitem__ return tensors, arrays or numbers, of one shape in all rows",
            )


def _notes(row: Mapping[str, Any], example: Mapping[str, Tensor]) -> Iterator[str]:
    for key, value in example.items():
        found, planned = torch.as_tensor(row[key]), value.shape[1:]
        if found.shape != planned or not _is_same_kind(found, value.dtype):
            yield (
                f"{key!r} is {_words(found.dtype, found.shape)} in the dataset's rows, and the "
                f"plan was made for {_words(value.dtype, planned)}\n"
                "  fix: let example_batch return such rows, and plan again"
            )
    left = [key for key in row if key not in example and _is_number(row[key])]
    if left:
        yield (
            f"the model is not given {', '.join(left)} of the dataset's rows, which example_batch "
            "does not have\n  fix: add them to example_batch if it should be, and plan again"
        )


def _few(rows: int, at_once: int) -> Iterator[str]:
    if rows < at_once:
        yield (
            f"the dataset has {rows} rows, fewer than the {at_once} that are trained on at once: "
            "some stand in a step several times"
        )


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(value)
    return tensor.to(dtype) if _is_same_kind(tensor, dtype) else tensor


def _is_same_kind(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether both are floating, or both whole numbers, or both true and false."""
    is_bool = (tensor.dtype is torch.bool) == (dtype is torch.bool)
    return is_bool and tensor.is_floating_point() == dtype.is_floating_point


def _is_number(value: Any) -> bool:
    """Whether a tensor can be made of something."""
    try:
        torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
