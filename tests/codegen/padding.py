"""Leaves out targets of a model's dataset, in every row others, and trains on what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from io import StringIO
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autopar.codegen.proof import plain as plain_rows
from autopar.codegen.proof.comparison import RankTrained
from autopar.codegen.proof.plain import Task, TrainedAlone
from autopar.codegen.proof.script_rank import run_script
from autopar.runtime.data import batches
from autopar.runtime.data.rows import RowPlace
from tests.codegen.normed_apart import train_normed_apart

IGNORED = -100  # what F.cross_entropy leaves out


class Padding(StrEnum):
    """Which targets of a row may be left out."""

    ANY = "any"
    LAST = "last"  # the model reads its labels too, all but the last
    NONE = "none"  # batch norm gives each block of rows statistics, so a loss, of its own


class PaddedTargets(Dataset[dict[str, Tensor]]):
    """The rows of a dataset; labels end early, in every row elsewhere, or are gone altogether."""

    def __init__(self, dataset: Dataset[dict[str, Tensor]], padding: Padding) -> None:
        self.dataset, self.padding = dataset, padding

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, place: RowPlace) -> dict[str, Tensor]:
        return with_padding(self.dataset[place], place.row, self.padding)


def with_padding(row: dict[str, Tensor], index: int, padding: Padding) -> dict[str, Tensor]:
    """Return a row with the end of its labels left out, or all of them."""
    labels = row["labels"].clone()
    if labels.ndim == 0:
        gone = index % 5 == 0
        return row | {"labels": labels.fill_(IGNORED) if gone else labels}
    kept = len(labels) - (index % 2 if padding is Padding.LAST else index * 7 % len(labels))
    labels[kept:] = IGNORED
    return row | {"labels": labels}


@contextmanager
def padded(padding: Padding) -> Iterator[None]:
    """Have every dataset's targets padded, that of a script and that of one process alike."""

    def loader(dataset: Dataset[dict[str, Tensor]], **options: Any) -> DataLoader[Any]:
        rows = dataset if padding is Padding.NONE else PaddedTargets(dataset, padding)
        return DataLoader(rows, **options)

    plain = plain_rows._row

    def row_of(dataset: Any, example: Any, place: tuple[int, int], seed: int) -> Any:
        row = dict(plain(dataset, example, place, seed))
        return row if padding is Padding.NONE else with_padding(row, place[1], padding)

    with (
        patch.object(batches, "DataLoader", loader),
        patch.object(plain_rows, "_row", row_of),
    ):
        yield


def run_padded_script(path: str, arguments: Sequence[str], padding: Padding) -> RankTrained:
    """Run a script's main on this rank."""
    with padded(padding), redirect_stdout(StringIO()):
        return run_script(path, arguments)


def train_padded_alone(task: Task, padding: Padding, parts_normed: int) -> TrainedAlone:
    """Train the model in one process."""
    with padded(padding):
        return train_normed_apart(task, parts_normed)
