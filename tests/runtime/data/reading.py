"""Reads the microbatches of a data rank as scripts do, without their options."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from autopar.runtime.data.batches import (
    Batch,
    Example,
    dataset_batches,
    read_dataset,
)
from autopar.runtime.data.epochs import Dealing, Epochs, LastRows, RowCounts, each_rank
from autopar.runtime.ranks.mesh import Mesh


def read_rows(
    new_dataset: Callable[[], Any],
    example_batch: Example,
    mesh: Mesh,
    *,
    microbatch: RowCounts,
    seed: int,
    last: LastRows = LastRows.RUN_ON,
    rows: int | None = None,
    microbatches: int = 1,
    **more: Any,
) -> Iterator[Batch]:
    """Yield microbatches of a dataset; `rows` are those that it says it has."""
    dataset = read_dataset(new_dataset, Namespace(data="dataset", seed=seed), mesh)
    each = tuple(each_rank(microbatch, mesh.data))
    dealing = Dealing(each=each, rank=mesh.data.rank, microbatches=microbatches)
    epochs = Epochs(rows=rows, per_step=dealing.per_step, last=last)
    return dataset_batches(
        dataset, example_batch, mesh, dealing=dealing, epochs=epochs, seed=seed, **more
    )
