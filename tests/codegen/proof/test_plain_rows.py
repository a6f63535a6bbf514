"""One process reads the rows that scripts read, and each key of a batch as a tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from autopar.codegen.proof.plain import plain_batches
from autopar.planner.model.model_file import ModelFile
from autopar.runtime.data.batches import synthetic_batches
from autopar.runtime.ranks.mesh import start
from tests.runtime.data.reading import read_rows


class Crops(Dataset[Any]):
    """Draws where it cuts; numbers and lists are among what it gives."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> Mapping[str, Any]:
        first = int(torch.randint(100, ()))
        return {"x": [float(at), float(first)], "label": at % 3, "unused": "text"}


def shared(rows: int) -> Mapping[str, Tensor]:
    ids = torch.randint(0, 9, (rows, 4))
    return {"input_ids": ids, "labels": ids}


def of_crops(rows: int) -> Mapping[str, Tensor]:
    return {"x": torch.zeros(rows, 2), "label": torch.zeros(rows, dtype=torch.int64)}


def file_of(example: Any, dataset: Any = None) -> ModelFile:
    return ModelFile(
        path=Path(__file__),
        factory="build_model",
        arguments=(),
        build_model=nn.Identity,
        example_batch=example,
        loss=None,
        build_dataset=dataset,
        build_optimizer=None,
        build_scheduler=None,
    )


@pytest.mark.parametrize("seed", [0, 7])
def test_rows_of_several_epochs_are_those_of_scripts(seed: int) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    file = file_of(of_crops, Crops)
    plain = plain_batches(file, rows=4, seed=seed, uses_dataset=True)
    scripts = read_rows(Crops, of_crops, mesh, microbatch=4, seed=seed)
    for one, other in islice(zip(plain, scripts, strict=False), 6):  # 24 rows of 10
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key])


def test_an_example_is_that_of_scripts_and_its_keys_share_no_memory() -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    plain = plain_batches(file_of(shared), rows=4, seed=3, uses_dataset=False)
    scripts = synthetic_batches(shared, mesh, rows=(1, 4), seed=3)
    for one, other in islice(zip(plain, scripts, strict=False), 2):
        assert one["input_ids"].data_ptr() != one["labels"].data_ptr()
        one["labels"].fill_(-100)  # of this batch alone
        assert torch.equal(one["input_ids"], other["input_ids"])
