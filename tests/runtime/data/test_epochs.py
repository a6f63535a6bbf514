"""Steps take the rows of an epoch as a loop over it does, and ranks share each step out exactly."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stderr
from fractions import Fraction
from itertools import chain, islice
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autopar.runtime.data.epochs import Dealing, Epochs, LastRows, epochs_of
from autopar.runtime.ranks.mesh import Mesh
from tests.runtime.data.reading import read_rows

ROWS = 11


class Listed(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(index)}


class Streamed(IterableDataset[dict[str, Tensor]]):
    """Rows in their order, as many as it says or others."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"x": torch.tensor(index)} for index in range(self.rows))


def example(rows: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, dtype=torch.int64)}


def ends_of(epochs: Epochs, begun: int) -> Iterator[int]:
    """Yield the position before each step, one row after the other."""
    assert epochs.rows is not None
    position, taken = begun, 0
    while True:
        left = epochs.rows - position % epochs.rows
        if taken == 0 and left < epochs.per_step and epochs.last is LastRows.DROP:
            position += left  # which nobody trains on
        if taken == 0:
            yield position
        taken, position = (taken + 1) % epochs.per_step, position + 1
        if position % epochs.rows == 0 and epochs.last is LastRows.PAD:
            taken = 0


@pytest.mark.parametrize("last", LastRows)
@pytest.mark.parametrize("per_step", [1, 3, 4, 11])
@pytest.mark.parametrize("begun", [0, 4, 8, 11, 15])
def test_positions_are_those_of_a_loop_over_the_rows(
    last: LastRows, per_step: int, begun: int
) -> None:
    epochs = Epochs(rows=ROWS, per_step=per_step, last=last)
    ends = list(islice(ends_of(epochs, begun), 60))
    assert [epochs.position(begun, steps) for steps in range(1, 60)] == ends[1:]
    for passed in (Fraction(1, 10), Fraction(1, 2), Fraction(1), Fraction(7, 3), Fraction(3)):
        target = ceil(passed * ROWS)
        expected = next(steps for steps, end in enumerate(ends) if end >= target)
        assert epochs.steps_until(passed, begun) == expected


@pytest.mark.parametrize(("each", "microbatches"), [((2, 2), 2), ((4, 3, 3), 1), ((1,), 8)])
@pytest.mark.parametrize("fewest", [1, 2])
def test_a_step_of_any_number_of_rows_is_shared_out_once(
    each: tuple[int, ...], microbatches: int, fewest: int
) -> None:
    fewest = min(fewest, *each)
    ranks = [
        Dealing(each=each, rank=rank, microbatches=microbatches, fewest=fewest)
        for rank in range(len(each))
    ]
    shared_out = [n for n in range(1, ranks[0].per_step + 1) if ranks[0].shares(n)]
    assert fewest > 1 or len(shared_out) == ranks[0].per_step
    for rows in shared_out:
        epochs = Epochs(rows=rows, per_step=ranks[0].per_step, last=LastRows.PAD)
        own = [list(islice(one.dealt(iter(range(rows)), epochs, 0), microbatches)) for one in ranks]
        parts = [list(islice(one.parts(epochs, 0), microbatches)) for one in ranks]
        counted = [
            row
            for rank in range(len(each))
            for found, part in zip(own[rank], parts[rank], strict=True)
            for row in (found if part else ())
        ]
        assert sorted(counted) == list(range(rows))
        assert sum(map(sum, parts)) == pytest.approx(len(each))
        for found, part in zip(chain(*own), chain(*parts), strict=True):
            assert part in (0, pytest.approx(len(found) * len(each) / rows))
            assert fewest <= len(found) <= max(each)


@pytest.mark.parametrize("dataset", [Listed, Streamed])
@pytest.mark.parametrize("last", [LastRows.DROP, LastRows.PAD])
def test_rows_of_an_epoch_come_as_a_loader_gives_them(
    dataset: type, last: LastRows, mesh: Mesh
) -> None:
    def read(skip: int) -> Iterator[list[int]]:
        batches = read_rows(
            dataset, example, mesh, microbatch=4, seed=0, last=last, rows=ROWS, skip=skip
        )
        return (batch["x"].tolist() for batch in batches)

    sizes = [len(one) for one in DataLoader(range(ROWS), 4, drop_last=last is LastRows.DROP)]  # type: ignore[arg-type]
    every = list(islice(read(0), 3 * len(sizes)))
    assert [len(one) for one in every] == 3 * sizes
    for epoch in range(3):
        rows = [*chain(*every[epoch * len(sizes) :][: len(sizes)])]
        assert len(set(rows)) == len(rows) == sum(sizes)
    epochs = Epochs(rows=ROWS, per_step=4, last=last)
    for steps in range(2 * len(sizes)):
        assert next(read(epochs.position(0, steps))) == every[steps]


@pytest.mark.parametrize(("said", "telling"), [(9, "9 rows, and gives more"), (13, "gives 11")])
def test_a_stream_that_is_not_as_long_as_it_says_is_refused(
    said: int, telling: str, mesh: Mesh
) -> None:
    told = io.StringIO()
    batches = read_rows(Streamed, example, mesh, microbatch=4, seed=0, last=LastRows.PAD, rows=said)
    with pytest.raises(SystemExit, match="6"), redirect_stderr(told):
        list(islice(batches, 9))
    assert telling in told.getvalue()


@pytest.mark.parametrize(
    ("dataset", "options", "telling"),
    [
        (Streamed(), {"epochs": Fraction(2)}, "--epochs is for a dataset whose rows are counted"),
        (Streamed(), {"last_rows": "drop"}, "--last-rows drop is for a dataset whose rows"),
        (Listed(3), {"last_rows": "drop"}, "3 rows, fewer than the 4 of a step"),
    ],
)
def test_epochs_that_a_dataset_has_not_are_refused(
    dataset: Any, options: dict[str, Any], telling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Namespace(**{"epochs": None, "last_rows": "run-on", **options})
    with pytest.raises(SystemExit, match="6"):
        epochs_of(dataset, given, 4)
    assert telling in capsys.readouterr().err


def test_a_plan_for_so_many_rows_alone_refuses_a_step_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = Dealing(each=(4,), rank=0, microbatches=2, fewest=4)
    whole.check(4)  # a microbatch of all its rows, and one that counts 0
    apart = Dealing(each=(4, 4), rank=0, may_repeat=False)
    apart.check(2)
    for dealing, rows in ((whole, 3), (whole, 6), (apart, 1)):
        with pytest.raises(SystemExit, match="6"):
            dealing.check(rows)
        assert f"the last step of an epoch has {rows} rows" in capsys.readouterr().err
