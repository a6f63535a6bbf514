"""Gives of a dataset's rows what a plan was made for, or says what they lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from autopar.runtime.data.collated import Row, as_column, is_number, is_same_kind
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import kept_numbers, mixed_seed, seed_numbers
from autopar.runtime.ranks.refusal import refuse
from autopar.runtime.ranks.user_code import told


class Place(NamedTuple):
    """Where a row stands: which time through the data it is, and the number of the row."""

    epoch: int
    row: int


class RawRows(Dataset[Any]):
    """The rows of a dataset as it has them, beside their places, for the model file's collate.

    What the dataset draws for a row (a crop, a window, a mask) depends on its place alone: ranks
    that share rows read the same, and other plans do. A dataset that reads several rows at once
    draws for all of them by the first.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.reads_at_once = _reads_at_once(dataset)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.dataset)

    def __getitem__(self, place: Place) -> Any:
        """Return one."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: list[Place]) -> list[Any]:
        """Return several, at once where the dataset can."""
        with kept_numbers():
            if self.reads_at_once:
                self._seed_by(places[0])
                with told_of_row(self.dataset):
                    found = self.dataset.__getitems__([place.row for place in places])
                return list(map(self.made, places, found))
            return [self._read(place) for place in places]

    def made(self, place: Place, row: Any) -> Any:
        """Return what is made of a row."""
        return place, row

    def _read(self, place: Place) -> Any:
        self._seed_by(place)
        with told_of_row(self.dataset):
            row = self.dataset[place.row]
        return self.made(place, row)

    def _seed_by(self, place: Place) -> None:
        seed_numbers(mixed_seed(self.seed, *place))


class Rows(RawRows):
    """The rows of a dataset as tensors, with some of their columns: others need make no batch.

    What is a list or a number becomes a tensor, since torch makes a batch of a row's list
    otherwise. Widths of numbers become those of the columns.
    """

    def __init__(self, dataset: Any, columns: Mapping[str, torch.dtype], *, seed: int) -> None:
        super().__init__(dataset, seed=seed)
        self.columns = dict(columns)

    def made(self, place: Place, row: Mapping[str, Any]) -> Row:
        """Return the columns of a row."""
        del place
        return row_of(row, self.columns)


def row_of(row: Mapping[str, Any], columns: Mapping[str, torch.dtype]) -> Row:
    """Return some columns of a row as tensors."""
    return {name: as_column(row[name], dtype) for name, dtype in columns.items()}


def _reads_at_once(dataset: Any) -> bool:
    """Whether a dataset reads several rows at once; torch's subsets only seem to."""
    if isinstance(dataset, Subset):
        return _reads_at_once(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def rows_like(
    dataset: Dataset[Any], example: Mapping[str, Tensor], mesh: Mesh, *, at_once: int = 0, seed: int
) -> Rows:
    """Return the rows of a dataset with the keys of an example batch.

    Leaves where there are no such keys, and says what the dataset should be. What else a row has
    no model is given; numbers among it are told, and so are other shapes and kinds, and fewer rows
    than the data ranks train on at once.
    """
    with told_of_row(dataset):
        first = dataset[0]
    check_row(first, dataset, example)
    tell([*_notes(first, example), *few(dataset, at_once)], mesh)
    return Rows(dataset, columns_of(example), seed=seed)


def told_of_row(dataset: Any) -> AbstractContextManager[None]:
    """Leave where reading a row fails, with one message for all ranks, whose rows are others."""
    return told(f"reading a row of the dataset ({type(dataset).__name__})")


def columns_of(example: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the columns that the model is given, with their types."""
    return {key: value.dtype for key, value in example.items()}


def tell(notes: Iterable[str], mesh: Mesh) -> None:
    """Say once what is worth a note."""
    for note in notes if mesh.rank == 0 else ():
        say(f"note: {note}")


def is_streamed(dataset: Any, *, maker: str = "build_dataset") -> bool:
    """Whether a dataset is read from its beginning to its end; leaves where it is no dataset."""
    name = f"the dataset ({type(dataset).__name__})"
    if isinstance(dataset, DataLoader):
        refuse(
            f"{name} is a loader, and the script makes its own",
            fix="return its dataset; its collate_fn is what build_collate() of the model file "
            "returns",
        )
    if isinstance(dataset, Mapping) or not hasattr(dataset, "__getitem__"):
        if isinstance(dataset, Mapping) or not hasattr(dataset, "__iter__"):
            refuse(f"{name} gives no row for a number", fix="give it __getitem__, or return a part")
        return True
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        if not hasattr(dataset, "__iter__"):
            refuse(f"{name} has no length", fix="give it __len__, or __iter__: ranks take rows")
        return True
    if len(dataset) == 0:
        refuse(f"{name} is empty", fix=f"look where {maker} reads from")
    return False


def check_row(row: Any, dataset: Any, example: Mapping[str, Tensor]) -> None:
    """Leave where a row is not what a plan was made for."""
    name = f"the dataset ({type(dataset).__name__})"
    fix = f"let __getitem__ return a dict with the keys of example_batch: {', '.join(example)}"
    if not isinstance(row, Mapping):
        refuse(f"a row of {name} is a {type(row).__name__}", fix=fix)
    missing = [key for key in example if key not in row]
    if missing:
        refuse(f"a row of {name} has {', '.join(row)}, but no {', '.join(missing)}", fix=fix)
    for key in example:
        if not is_number(row[key]):
            refuse(
                f"{key!r} in a row of {name} is a {type(row[key]).__name__}, which is no tensor",
                fix="let __getitem__ return tensors, arrays or numbers, of one shape in all rows",
            )
        found, planned = torch.as_tensor(row[key]), example[key][0]
        if found.ndim != planned.ndim or not is_same_kind(found, planned.dtype):
            refuse(
                f"{key!r} is {_words(found.dtype, found.shape)} in a row of {name}, and the plan "
                f"was made for {_words(planned.dtype, planned.shape)}",
                fix="let both be alike: change the dataset, or example_batch and plan again",
            )


def _notes(row: Mapping[str, Any], example: Mapping[str, Tensor]) -> Iterator[str]:
    for key, value in example.items():
        found, planned = torch.as_tensor(row[key]), value.shape[1:]
        if found.shape != planned:
            yield (
                f"{key!r} is {_words(found.dtype, found.shape)} in the dataset's rows, and the "
                f"plan was made for {_words(value.dtype, planned)}\n"
                "  fix: let example_batch return such rows, and plan again"
            )
    left = [key for key in row if key not in example and is_number(row[key])]
    if left:
        yield (
            f"the model is not given {', '.join(left)} of the dataset's rows, of which "
            "example_batch has no tensor\n  fix: let it return one, with an entry for each row, if "
            "the model should be given it, and plan again"
        )


def few(dataset: Any, at_once: int) -> Iterator[str]:
    """Yield a note where a dataset has fewer rows than are trained on at once."""
    rows = len(dataset)
    if rows < at_once:
        yield (
            f"the dataset has {rows} rows, fewer than the {at_once} that are trained on at once: "
            "some stand in a step several times"
        )


def _words(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
