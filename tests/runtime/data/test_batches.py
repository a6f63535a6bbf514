"""Every plan trains on the same rows."""

import hashlib
import io
import random
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, random_split

from autopar.runtime.data.batches import gathered_rows, shuffled, synthetic_batches
from autopar.runtime.data.epochs import RowCounts
from autopar.runtime.data.rows import to_device
from autopar.runtime.ranks.mesh import ALONE, Mesh, start
from autopar.runtime.ranks.randomness import mixed_seed
from tests.runtime.data.reading import read_rows
from tests.runtime.processes import run_on_ranks

LENGTH = 10


class Numbers(Dataset[dict[str, Tensor]]):
    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index))}


def rows(data: int, microbatch: RowCounts, count: int) -> list[list[int]]:
    mesh = start(pipeline=1, data=data, tensor=1)
    batches = read_rows(Numbers, _example, mesh, microbatch=microbatch, seed=0)
    return [batch["x"].int().tolist() for batch in islice(batches, count)]


def noise(data: int, microbatch: RowCounts, count: int) -> list[list[float]]:
    mesh = start(pipeline=1, data=data, tensor=1)
    batches = synthetic_batches(_example, mesh, rows=(count, microbatch), seed=0)
    return [batch["x"].tolist() for batch in islice(batches, count)]


def _example(size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(size)}


class Pairs(Numbers):
    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, index


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows of which nobody knows how many there are, with a number drawn for each."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(self.length):
            yield {"x": torch.tensor([float(index), random.random()])}


class OneTime:
    def __init__(self) -> None:
        self.rows = iter([{"x": torch.tensor(0.0)}])

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.rows


class Lines(Numbers):
    """Rows as long as their numbers."""

    def __getitem__(self, index: int) -> Any:
        return [index] * (index + 1)


def padding() -> Callable[[list[Any]], dict[str, Tensor]]:
    def padded(rows: list[Any]) -> dict[str, Tensor]:
        tensors = [torch.tensor(row) for row in rows]
        x = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=-1)
        return {"x": x, "drawn": torch.rand(len(rows)), "more": torch.ones(())}

    return padded


def streamed(data: int, microbatch: int, count: int, workers: int = 0) -> list[Any]:
    mesh = start(pipeline=1, data=data, tensor=1)
    batches = read_rows(
        lambda: Stream(5), lambda rows: {"x": torch.zeros(rows, 2)}, mesh,
        microbatch=microbatch, seed=0, workers=workers,
    )  # fmt: skip
    return [batch["x"].tolist() for batch in islice(batches, count)]


def collated(tensor: int, shares: bool, collate: Callable[[], Any] = padding) -> list[Any]:
    mesh = start(pipeline=1, data=1, tensor=tensor)
    axis = mesh.tensor if shares else ALONE
    batches = read_rows(
        Lines,
        lambda rows: {"x": torch.zeros(rows, 2).long(), "drawn": torch.zeros(rows)},
        mesh,
        microbatch=3,
        seed=0,
        rows_over=axis,
        new_collate=collate,
    )
    return [(one["x"].tolist(), one["drawn"].tolist()) for one in islice(batches, 3)]


def refusal_of_collate(made: Any) -> str:
    told = io.StringIO()
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        collated(1, False, lambda: lambda _: made)
    return told.getvalue()


class Augmented(Numbers):
    """Rows with what torch, Python and numpy have drawn for them, in an order drawn as well."""

    def __init__(self) -> None:
        super().__init__()
        self.order = random.sample(range(LENGTH), LENGTH)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return {"x": torch.tensor([self.order[index], *drawn])}


def split_augmented() -> Dataset[dict[str, Tensor]]:
    return random_split(Augmented(), [LENGTH - 2, 2])[0]


def augmented(
    data: int,
    microbatch: int,
    count: int,
    workers: int = 0,
    new_dataset: Callable[[], Dataset[Any]] = Augmented,
) -> list[list[list[float]]]:
    mesh = start(pipeline=1, data=data, tensor=1)
    random.seed()  # as Python is in every process at first
    batches = read_rows(
        new_dataset, lambda rows: {"x": torch.zeros(rows, 4)}, mesh,
        microbatch=microbatch, seed=0, workers=workers,
    )  # fmt: skip
    return [batch["x"].tolist() for batch in islice(batches, count)]


def shared(microbatch: int, is_synthetic: bool) -> list[tuple[list[float], list[float]]]:
    """Return what a tensor rank has of microbatches: its own rows of x, all rows of y."""
    mesh = start(pipeline=1, data=1, tensor=dist.get_world_size())
    if is_synthetic:
        batches = synthetic_batches(
            _pairs, mesh, rows=(2, microbatch), seed=0, rows_over=mesh.tensor
        )
    else:
        batches = read_rows(
            Twice, _pairs, mesh, microbatch=microbatch, seed=0, rows_over=mesh.tensor
        )
    whole = (gathered_rows(one, ["x"], mesh.tensor, rows=microbatch) for one in batches)
    return [(one["x"].tolist(), one["y"].tolist()) for one in islice(whole, 3)]


def _pairs(size: int) -> dict[str, Tensor]:
    x = torch.randn(size)
    return {"x": x, "y": 2 * x}


class Twice(Numbers):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index)), "y": torch.tensor(2.0 * index)}


class Unseeded(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(float(index)), "y": torch.tensor(self.generator.random())}


def refusal_of_unseeded(pipeline: int, tensor: int) -> str:
    mesh, told = start(pipeline=pipeline, data=1, tensor=tensor), io.StringIO()
    batches = read_rows(
        Unseeded, lambda rows: {"x": torch.ones(rows), "y": torch.ones(rows)}, mesh,
        microbatch=2, seed=0,
    )  # fmt: skip
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        next(batches)
    return told.getvalue()


def unlike_lengths(longer: int) -> str:
    """Return what each of two data ranks says, of which the second has more rows."""
    mesh, told = start(pipeline=1, data=2, tensor=1), io.StringIO()
    new_dataset = partial(Numbers, LENGTH + longer * mesh.rank)
    with redirect_stderr(told):
        try:
            next(read_rows(new_dataset, _example, mesh, microbatch=1, seed=0))
        except SystemExit as left:
            return f"{left.code} {told.getvalue()}"
    return told.getvalue()


def refusal(dataset: Any) -> str:
    mesh, told = start(pipeline=1, data=1, tensor=1), io.StringIO()
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        list(islice(read_rows(lambda: dataset, _example, mesh, microbatch=1, seed=0), 2))
    return told.getvalue()


def widened() -> list[torch.dtype]:
    mesh: Mesh = start(pipeline=1, data=1, tensor=1)
    batch: dict[str, Any] = {"x": torch.zeros(1), "n": torch.zeros(1, dtype=torch.int64)}
    return [v.dtype for dtype in (torch.float64, torch.bfloat16)
            for v in to_device(batch, mesh, dtype).values()]  # fmt: skip


def test_data_ranks_share_the_rows_that_one_process_would_take() -> None:
    ((*alone,),) = run_on_ranks(rows, 1, 1, 4, 5)
    first, second = run_on_ranks(rows, 2, 2, 2, 5)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


def test_a_dataset_that_is_not_equally_long_on_all_ranks_is_refused() -> None:
    assert run_on_ranks(unlike_lengths, 2, 0) == ["", ""]
    for told in run_on_ranks(unlike_lengths, 2, 3):
        assert told.startswith(
            "6 error: build_dataset() returns 10 rows on rank 0 and 13 on rank 1"
        )


def test_data_ranks_may_have_rows_of_their_own_number() -> None:
    ((*alone,),) = run_on_ranks(rows, 1, 1, 4, 5)
    first, second = run_on_ranks(rows, 2, 2, (3, 1), 5)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone
    assert {len(batch) for batch in first} == {3}
    ((*whole,),) = run_on_ranks(noise, 1, 1, 4, 3)
    most, least = run_on_ranks(noise, 2, 2, (3, 1), 3)
    assert [a + b for a, b in zip(most, least, strict=True)] == whole


def test_rows_go_through_the_data_again_and_again_in_another_order() -> None:
    ((*batches,),) = run_on_ranks(rows, 1, 1, 5, 4)
    once, again = batches[0] + batches[1], batches[2] + batches[3]
    assert sorted(once) == sorted(again) == list(range(LENGTH))
    assert once != again


def test_example_batches_are_cut_alike() -> None:
    ((*alone,),) = run_on_ranks(noise, 1, 1, 4, 3)
    first, second = run_on_ranks(noise, 2, 2, 2, 3)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


@pytest.mark.parametrize("new_dataset", [Augmented, split_augmented])
def test_what_a_dataset_draws_is_the_same_under_every_plan(
    new_dataset: Callable[[], Dataset[Any]],
) -> None:
    ((*alone,),) = run_on_ranks(augmented, 1, 1, 4, 5, 0, new_dataset)
    first, second = run_on_ranks(augmented, 2, 2, 2, 5, 0, new_dataset)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone


def test_what_a_dataset_draws_for_a_row_is_new_each_time() -> None:
    ((once, again),) = run_on_ranks(augmented, 1, 1, LENGTH, 2)
    drawn = [number for row in once + again for number in row[1:]]
    assert len(set(drawn)) == len(drawn) == 2 * LENGTH * 3


def test_rows_that_are_read_ahead_are_the_same() -> None:
    assert augmented(1, 4, 5, workers=2) == augmented(1, 4, 5)  # here: ranks have no children


@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (1, 2)])
def test_ranks_that_read_other_rows_than_those_that_they_share_are_refused(
    pipeline: int, tensor: int
) -> None:
    for told in run_on_ranks(refusal_of_unseeded, 2, pipeline, tensor):
        assert "have read different ones: 'y' of their first batch differ" in told


@pytest.mark.parametrize("is_synthetic", [False, True])
@pytest.mark.parametrize("microbatch", [4, 5])
def test_tensor_ranks_read_their_own_rows_and_gather_what_they_need_of_all(
    microbatch: int, *, is_synthetic: bool
) -> None:
    (alone,) = run_on_ranks(shared, 1, microbatch, is_synthetic)
    first, second = run_on_ranks(shared, 2, microbatch, is_synthetic)
    for whole, one, other in zip(alone, first, second, strict=True):
        assert one[0] + other[0] == whole[0]
        assert len(one[0]) == (microbatch + 1) // 2
        assert one[1] == other[1] == whole[1] == [2 * x for x in whole[0]]


def reading_drawn() -> list[float]:
    """Return what is drawn between rows: those of a dataset are drawn apart from it."""
    mesh = start(pipeline=1, data=1, tensor=1)
    batches = read_rows(
        Augmented, lambda rows: {"x": torch.zeros(rows, 4)}, mesh, microbatch=2, seed=0
    )
    torch.manual_seed(3)
    return [torch.rand(()).item() for _ in islice(batches, 3)]


def test_reading_rows_leaves_the_numbers_of_a_training_alone() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(()).item() for _ in range(3)]
    assert run_on_ranks(reading_drawn, 1) == [expected]


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
        (Stream(0), "the dataset (Stream) is empty"),
        (OneTime(), "the dataset (OneTime) has no rows the second time it is read"),
        (DataLoader(Numbers(4)), "the dataset (DataLoader) is a loader"),
        ({"train": Numbers(4)}, "the dataset (dict) gives no row for an index"),
    ],
)
def test_a_dataset_that_makes_no_batches_is_refused(dataset: Any, telling: str) -> None:
    (told,) = run_on_ranks(refusal, 1, dataset)
    assert telling in told


def test_only_floating_tensors_become_wider() -> None:
    wide, whole, narrow, same = run_on_ranks(widened, 1)[0]
    assert (wide, whole) == (torch.float64, torch.int64)
    assert (narrow, same) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("training", "expected"), [(torch.float32, torch.float32), (torch.float16, torch.float16)]
)
def test_a_batch_in_16_bits_is_taken_as_the_training_needs_it(
    training: torch.dtype, expected: torch.dtype
) -> None:
    mesh = start(pipeline=1, data=1, tensor=1)
    batch = {"x": torch.zeros(1, dtype=torch.float16)}
    assert to_device(batch, mesh, training)["x"].dtype is expected


def test_a_stream_of_rows_is_shared_out_as_it_comes_and_begins_anew() -> None:
    ((*alone,),) = run_on_ranks(streamed, 1, 1, 4, 3)
    first, second = run_on_ranks(streamed, 2, 2, 2, 3)
    assert [a + b for a, b in zip(first, second, strict=True)] == alone
    rows = [row for batch in alone for row in batch]
    assert [number for number, _ in rows] == [*range(5), *range(5), 0, 1]
    assert len({drawn for _, drawn in rows}) == len(rows)  # anew the second time
    assert streamed(1, 4, 3, workers=3) == alone  # as read ahead


def test_rows_are_as_long_as_the_longest_of_their_microbatch() -> None:
    (alone,) = run_on_ranks(collated, 1, 1, False)
    for x, _ in alone:
        assert {len(row) for row in x} == {max(row[0] for row in x) + 1}
    assert run_on_ranks(collated, 2, 2, False) == [alone, alone]  # what is drawn is the same
    first, second = run_on_ranks(collated, 2, 2, True)
    assert [(a + c, b + d) for (a, b), (c, d) in zip(first, second, strict=True)] == alone


@pytest.mark.parametrize(
    ("made", "telling"),
    [
        (torch.ones(3), "build_collate() makes a Tensor of rows"),
        ({"x": torch.ones(3)}, "build_collate() makes batches of x, not drawn"),
        ({"x": torch.ones(3), "drawn": "a"}, "'drawn' of build_collate() is a str"),
        ({"x": torch.ones(2), "drawn": torch.ones(3)}, "'x' of build_collate() is [2] for 3 rows"),
    ],
)
def test_a_collate_that_makes_no_batches_is_refused(made: Any, telling: str) -> None:
    (told,) = run_on_ranks(refusal_of_collate, 1, made)
    assert telling in told


def test_the_order_of_rows_is_that_of_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "model-file.md").read_text(encoding="utf-8")
    code = re.search(r"### The order of rows.*?```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"hashlib": hashlib, "torch": torch, "seed": 0, "epochs": 4}
    names |= {"dataset": Numbers(), "global_batch": 4}
    one, other = run_on_ranks(rows, 2, 2, 2, 3)
    for step in range(3):
        names["step"] = step
        exec(code[1], names)
        assert one[step] + other[step] == names["batch"]


def test_the_order_of_many_rows_is_not_held_as_python_integers() -> None:
    tracemalloc.start()
    try:
        order = [place.row for place in islice(shuffled(10**6, seed=3, skip=5), 10)]
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    generator = torch.Generator().manual_seed(mixed_seed(3, 0))
    assert order == torch.randperm(10**6, generator=generator)[5:15].tolist()
    assert most_bytes < 8 * 10**6  # of the pointers of a list alone
