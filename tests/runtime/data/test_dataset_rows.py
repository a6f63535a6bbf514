"""Rows of datasets as people have them: lists, names beside numbers, other widths, what lacks."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from autopar.runtime.ranks.mesh import start
from tests.runtime.data.reading import read_rows


class Same(Dataset[Any]):
    """One row, again and again."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = row

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> Mapping[str, Any]:
        return self.row


class AtOnce(Same):
    """Rows that are read several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Mapping[str, Any]]:
        return [{**self.row, "ids": [index] * 3} for index in indices]


def example(rows: int) -> dict[str, Tensor]:
    return {"ids": torch.ones(rows, 3, dtype=torch.int64), "score": torch.ones(rows)}


def batch_of(dataset: Dataset[Any]) -> dict[str, Tensor]:
    mesh = start(pipeline=1, data=1, tensor=1)
    (batch,) = islice(read_rows(lambda: dataset, example, mesh, microbatch=2, seed=0), 1)
    return batch


@pytest.mark.parametrize(
    "row",
    [
        {"ids": torch.tensor([1, 2, 3]), "score": torch.tensor(0.5)},
        {"ids": [1, 2, 3], "score": 0.5},
        {"ids": np.array([1, 2, 3], dtype=np.int32), "score": np.float64(0.5)},
        {"ids": [1, 2, 3], "score": 0.5, "text": "a name", "words": ["of", "any", "length"]},
    ],
    ids=["tensors", "lists", "arrays", "with names"],
)
def test_rows_become_tensors_like_the_examples(
    capsys: pytest.CaptureFixture[str], row: dict[str, Any]
) -> None:
    batch = batch_of(Same(row))
    assert list(batch) == ["ids", "score"]
    assert torch.equal(batch["ids"], torch.tensor([[1, 2, 3]] * 2))
    assert torch.equal(batch["score"], torch.tensor([0.5, 0.5]))
    assert batch["score"].dtype is torch.float32
    assert capsys.readouterr().err == ""


def test_rows_that_are_read_at_once_are() -> None:
    batch = batch_of(AtOnce({"ids": [9, 9, 9], "score": 1.0}))
    assert sorted(set(batch["ids"].flatten().tolist())) != [9]


class Growing(Same):
    """Rows of which the next is longer."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {**self.row, "ids": [1] * (3 + index)}


def test_rows_of_several_lengths_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="6"):
        batch_of(Growing({"score": 1.0}))
    told = capsys.readouterr().err
    assert "'ids' is [" in told.splitlines()[-2]
    assert "in one row of the dataset and [" in told
    assert "pad or cut all rows" in told


def test_a_dataset_that_is_smaller_than_a_batch_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    dataset = Same({"ids": [1, 2, 3], "score": 1.0})
    next(read_rows(lambda: dataset, example, mesh, microbatch=5, seed=0))
    told = capsys.readouterr().err
    assert "has 4 rows, fewer than the 5 that are trained on at once" in told
    next(read_rows(lambda: dataset, example, mesh, microbatch=4, seed=0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("row", "telling"),
    [
        (
            {"ids": [1, 2], "score": 0.5},
            "'ids' is int64[2] in the dataset's rows, and the plan was",
        ),
        ({"ids": [1, 1, 1], "score": 0.5, "mask": [1, 1, 1]}, "the model is not given mask of"),
    ],
)
def test_rows_that_are_not_what_the_plan_was_made_for_are_told(
    capsys: pytest.CaptureFixture[str], row: dict[str, Any], telling: str
) -> None:
    assert list(batch_of(Same(row))) == ["ids", "score"]
    assert telling in capsys.readouterr().err


class Broken(Same):
    """Rows that cannot be read."""

    def __getitem__(self, _: int) -> Mapping[str, Any]:
        return {"ids": self.row["tokens"]}


def _no_file() -> Dataset[Any]:
    raise FileNotFoundError("no file train.bin")


def _no_key(rows: list[Any]) -> dict[str, Any]:
    return {"ids": [row["tokens"] for row in rows]}


GOOD = {"ids": [1, 2, 3], "score": 0.5}


@pytest.mark.parametrize(
    ("new_dataset", "new_collate", "telling"),
    [
        (_no_file, None, "build_dataset() of the model file fails: FileNotFoundError: no file"),
        (lambda: Broken(GOOD), None, "reading a row of the dataset (Broken) fails: KeyError"),
        (lambda: Stream(Broken(GOOD)), None, "reading a row of the dataset (Stream) fails"),
        (lambda: Same(GOOD), lambda: _no_key, "build_collate()'s function fails: KeyError"),
        (lambda: Same(GOOD), lambda: None, "build_collate() of the model file returns a NoneType"),
        (lambda: Same(GOOD), lambda: 1 / 0, "build_collate() of the model file fails: ZeroDiv"),
        (lambda: Same(GOOD), lambda: list, "build_collate() makes a list of rows"),
        (lambda: Same({"ids": [1]}), None, "a row of the dataset (Same) has ids, but no score"),
        (lambda: Same({**GOOD, "ids": "a"}), None, "'ids' in a row of the dataset (Same) is a str"),
        (
            lambda: Same({**GOOD, "ids": None}),
            None,
            "'ids' in a row of the dataset (Same) is a None",
        ),
        (
            lambda: Same({**GOOD, "ids": [0.5, 0.5, 0.5]}),
            None,
            "'ids' is float32[3] in a row of the dataset (Same), and the plan was made for int64",
        ),
        (
            lambda: Same({**GOOD, "ids": [[1, 2, 3]]}),
            None,
            "'ids' is int64[1, 3] in a row of the dataset (Same), and the plan was made for int64",
        ),
    ],
)
def test_a_fault_of_the_data_is_one_message(
    capsys: pytest.CaptureFixture[str],
    new_dataset: Callable[[], Any],
    new_collate: Callable[[], Any] | None,
    telling: str,
) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    with pytest.raises(SystemExit, match="6"):
        next(read_rows(new_dataset, example, mesh, microbatch=2, seed=0, new_collate=new_collate))
    said, fix = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {telling}")
    assert fix.startswith("  fix: ")
    started = fix.endswith("; a relative path starts in the working directory")
    assert started is (new_dataset is _no_file)
    if " fails: " in said:
        assert Path(__file__).name in fix


class LaterBroken(Same):
    """Rows of which the first alone, which is read before, can be read."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.row if index == 0 else {"ids": self.row["tokens"]}


def _new_collate_without_key() -> Callable[[Any], Any]:
    return _no_key


def read_by_a_worker(task: bytes) -> None:
    dataset, new_collate = pickle.loads(task)
    mesh = start(pipeline=1, data=1, tensor=1)
    next(
        read_rows(
            lambda: dataset, example, mesh, microbatch=4, seed=0, workers=1, new_collate=new_collate
        )
    )


@pytest.mark.parametrize(
    ("dataset", "new_collate", "telling"),
    [
        (LaterBroken(GOOD), None, "reading a row of the dataset (LaterBroken) fails: KeyError"),
        (Growing(GOOD), None, "'ids' is ["),
        (Same(GOOD), _new_collate_without_key, "build_collate()'s function fails: KeyError"),
    ],
    ids=["a row that cannot be read", "rows of several lengths", "a collate that fails"],
)
@pytest.mark.usefixtures("forked_python")
def test_a_fault_in_a_worker_is_the_same_message(
    dataset: Dataset[Any],
    new_collate: Callable[[], Any] | None,
    telling: str,
) -> None:
    # A process of its own: workers are forked, and this one has run other tests in many threads.
    task = pickle.dumps((dataset, new_collate))
    code = f"from {__name__} import read_by_a_worker; read_by_a_worker({task!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 6
    said, fix, *_ = done.stderr.splitlines()  # a torch with CUDA may add how it ends
    assert said.startswith(f"error: {telling}")
    assert fix.startswith("  fix: ")


class Stream(IterableDataset[Any]):
    """The rows of a dataset, one after another."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        yield self.dataset[0]
