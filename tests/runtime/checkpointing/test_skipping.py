"""Data that goes on in the middle of a time through it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from autopar.runtime.ranks.mesh import Mesh
from tests.runtime.data.reading import read_rows

READ: list[int] = []


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        READ.append(index)
        return {"x": torch.tensor([float(index), torch.rand(()).item()])}


class Streamed:
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Numbered()[index] for index in range(7))


def _example(rows: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, 2)}


@pytest.mark.parametrize("dataset", [Numbered, Streamed])
def test_rows_that_have_been_seen_are_skipped(dataset: type, mesh: Mesh) -> None:
    batches = partial(read_rows, dataset, _example, mesh, microbatch=2, seed=3)
    every = list(islice(batches(), 9))
    for steps in range(8):
        READ.clear()
        (found,) = islice(batches(skip=2 * steps), 1)
        assert torch.equal(found["x"], every[steps]["x"])
        assert dataset is Streamed or len(READ) <= 3  # one of them to see what rows look like
