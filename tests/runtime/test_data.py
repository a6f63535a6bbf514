"""Every plan trains on the same rows."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autopar.runtime.data import dataset_batches, placed, synthetic_batches
from autopar.runtime.mesh import Mesh, start
from tests.runtime.ranks import run_on_ranks

LENGTH = 10


class Numbers(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index))}


def rows(data: int, microbatch: int, count: int) -> list[list[int]]:
    mesh = start(pipeline=1, data=data, tensor=1)
    batches = dataset_batches(Numbers(), _example, mesh, microbatch=microbatch, seed=0)
    return [batch["x"].int().tolist() for batch in islice(batches, count)]


def noise(data: int, microbatch: int, count: int) -> list[list[float]]:
    mesh = start(pipeline=1, data=data, tensor=1)
    batches = synthetic_batches(_example, mesh, rows=(count, microbatch), seed=0)
    return [batch["x"].tolist() for batch in islice(batches, count)]


def _example(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size)}


class Pairs(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, index


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield {"x": torch.tensor(0.0)}


def refusal(dataset: Dataset[Any]) -> str:
    mesh, told = start(pipeline=1, data=1, tensor=1), io.StringIO()
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        dataset_batches(dataset, _example, mesh, microbatch=1, seed=0)
    return told.getvalue()


def widened() -> list[torch.dtype]:
    mesh: Mesh = start(pipeline=1, data=1, tensor=1)
    batch: dict[str, Any] = {"x": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}
    return [v.dtype for dtype in (torch.float64, torch.bfloat16)
            for v in placed(batch, mesh, dtype).values()]  # fmt: skip


def test_data_ranks_share_the_rows_that_one_process_would_take() -> None:
    ((*alone,),) = run_on_ranks(rows, 1, 1, 4, 5)
    first, second = run_on_ranks(rows, 2, 2, 2, 5)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


def test_rows_go_through_the_data_again_and_again_in_another_order() -> None:
    ((*batches,),) = run_on_ranks(rows, 1, 1, 5, 4)
    once, again = batches[0] + batches[1], batches[2] + batches[3]
    assert sorted(once) == sorted(again) == list(range(LENGTH))
    assert once != again


def test_example_batches_are_cut_alike() -> None:
    ((*alone,),) = run_on_ranks(noise, 1, 1, 4, 3)
    first, second = run_on_ranks(noise, 2, 2, 2, 3)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


def written() -> list[tuple[float, int]]:
    mesh = start(pipeline=1, data=1, tensor=1)
    batches = synthetic_batches(lambda rows: {"x": torch.zeros(rows)}, mesh, rows=(2, 3), seed=0)
    tensors = [batch["x"].add_(1) for batch in islice(batches, 4)]
    return [(tensor.sum().item(), tensor._version) for tensor in tensors]


def test_what_a_model_writes_into_a_batch_stays_in_it() -> None:
    assert run_on_ranks(written, 1) == [[(3.0, 1)] * 4]


@pytest.mark.parametrize(
    ("dataset", "telling"),
    [
        (Numbers(0), "the dataset (Numbers) is empty"),
        (Pairs(), "a row of the dataset (Pairs) is a tuple"),
        (Stream(), "the dataset (Stream) has no length"),
        (DataLoader(Numbers(4)), "the dataset (DataLoader) gives no row for a number"),
        ({"train": Numbers(4)}, "the dataset (dict) gives no row for a number"),
    ],
)
def test_a_dataset_that_makes_no_batches_is_refused(dataset: Dataset[Any], telling: str) -> None:
    (told,) = run_on_ranks(refusal, 1, dataset)
    assert telling in told


def test_only_floating_tensors_become_wider() -> None:
    wide, whole, narrow, same = run_on_ranks(widened, 1)[0]
    assert (wide, whole) == (torch.float64, torch.int64)
    assert (narrow, same) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("training", "expected"),
    [(torch.float32, torch.float32), (torch.float16, torch.float16)],
)
def test_a_batch_in_16_bits_is_taken_as_the_training_needs_it(
    training: torch.dtype, expected: torch.dtype
) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    batch = {"x": torch.zeros(1, dtype=torch.float16)}
    assert placed(batch, mesh, training)["x"].dtype is expected
