"""Turns the dataset that a model is evaluated on into the microbatches of this rank."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Sampler

from autopar.runtime.data.batches import (
    Batch,
    Example,
    Rows,
    each_rank,
    example_of,
    gathered_rows,
    placed,
    share_of,
)
from autopar.runtime.data.collated import Collate, Collated, built_collate, stacked
from autopar.runtime.data.dataset_rows import (
    Place,
    RawRows,
    is_streamed,
    rows_like,
    tell,
    told_of_row,
)
from autopar.runtime.data.row_faults import columns_of
from autopar.runtime.evaluation.dealing import Dealer
from autopar.runtime.ranks.agreement import agreed, check_same_length
from autopar.runtime.ranks.mesh import ALONE, Axis, Mesh
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.ranks.refusal import refusals_of_workers, refuse
from autopar.runtime.ranks.user_code import told

MAKER = "build_eval_dataset"
MOST_STREAMED = 10**6  # rows without numbers, which are held in memory


def read_evaluation(
    example_batch: Example,
    new_dataset: Callable[[], Any],
    options: Namespace,
    mesh: Mesh,
    *,
    microbatch: Rows,
    new_collate: Callable[[], Collate] | None = None,
    rows_over: Axis = ALONE,
    own: Collection[str] = (),
    fills: bool = True,
) -> EvaluationRows | None:
    """Return the rows that a model is evaluated on; None where it is not to be evaluated.

    Ranks of `rows_over` read a share of a microbatch each, and gather all of it but `own`. Where
    rows meet (not `fills`), those at the end that do not fill a microbatch are left out.
    """
    if not options.eval_every or options.data == "synthetic" or mesh.is_dry_run:
        return None
    each = each_rank(microbatch, mesh.data)
    dealer = Dealer(each=each, rank=mesh.data.rank, fills=fills)
    example = example_of(example_batch, dealer.size, options.seed)
    with seeded(options.seed):
        dataset = _built(new_dataset)
        collate = built_collate(new_collate) if new_collate is not None else None
    check_same_length(len(dataset), MAKER, mesh)
    if not fills:
        _tell_left(len(dataset), dealer, mesh)
    share = share_of(dealer.size, rows_over)
    if collate is None:
        rows: RawRows = rows_like(dataset, example, mesh, seed=options.seed)
        return EvaluationRows(rows, stacked, dealer, share, options, mesh, rows_over, own)
    rows = RawRows(dataset, seed=options.seed)
    batch_of = Collated(collate, columns_of(example), share, seed=options.seed)
    every = slice(dealer.size)  # rows are as long as the longest of their microbatch
    return EvaluationRows(rows, batch_of, dealer, every, options, mesh, rows_over, own)


def _built(new_dataset: Callable[[], Any]) -> Any:
    """Return the dataset; the rows of a stream as a list."""
    with told(f"{MAKER}() of the model file"):
        dataset = new_dataset()
    if not is_streamed(dataset, maker=MAKER):
        return dataset
    with told_of_row(dataset):
        rows = list(islice(dataset, MOST_STREAMED + 1))
    if len(rows) > MOST_STREAMED:
        refuse(
            f"{MAKER}() streams more than {MOST_STREAMED:,} rows, and a stream is held in memory",
            fix="let it end earlier, or give it __len__ and __getitem__",
        )
    is_streamed(rows, maker=MAKER)  # leaves where there are none
    return rows


def _tell_left(rows: int, dealer: Dealer, mesh: Mesh) -> None:
    """Say how many rows are left out as they fill no batch; leave where none would be left."""
    met = f"whose rows meet in batches of {dealer.block}"
    if rows < dealer.block:
        refuse(
            f"{MAKER}() has {rows} rows, and is for a model {met}",
            fix=f"let it have {dealer.block} rows, or a multiple of that",
        )
    if left := rows % dealer.block:
        tell([f"{left} of the {rows:,} rows of {MAKER}() are left out, for a model {met}"], mesh)


@dataclass(frozen=True, slots=True)
class EvaluationRows:
    """The rows that a model is evaluated on, and how this rank reads its microbatches of them."""

    rows: RawRows
    batch_of: Callable[[list[Any]], Batch]
    dealer: Dealer
    read: slice  # of a microbatch
    options: Namespace
    mesh: Mesh
    rows_over: Axis
    own: Collection[str]

    @property
    def count(self) -> int:
        """How many rows there are, but for those that are left out."""
        rows = len(self.rows)
        return rows if self.dealer.fills else rows - rows % self.dealer.block

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's microbatches, and how often each of their rows is there."""
        mesh = self.mesh
        sharers = (mesh.pipeline,) if self.rows_over.size > 1 else (mesh.tensor, mesh.pipeline)
        loader = DataLoader(
            self.rows,
            batch_sampler=_Places(self),
            collate_fn=self.batch_of,
            num_workers=self.options.workers,
            pin_memory=mesh.device.type == "cuda",
        )
        times = (times for _, times in self.dealer.deal(range(len(self.rows))))
        with refusals_of_workers():
            yield from zip(agreed(iter(loader), sharers, mesh.device), times, strict=True)

    def placed(self, batch: Batch) -> Batch:
        """Return a microbatch as the model takes it: on its device, with all rows that it needs."""
        batch = placed(batch, self.mesh, self.options.dtype)
        if self.rows_over.size == 1:
            return batch
        return gathered_rows(batch, self.own, self.rows_over, rows=self.dealer.size)

    def whole(self, batch: Batch) -> Batch:
        """Return a microbatch with all rows, of what the model needs its own of, too."""
        own = {key: batch[key] for key in self.own}
        return {**batch, **gathered_rows(own, (), self.rows_over, rows=self.dealer.size)}


class _Places(Sampler[list[Place]]):
    """The places of what this rank reads of each of its microbatches, in the dataset's order."""

    def __init__(self, of: EvaluationRows) -> None:
        self.of = of

    def __iter__(self) -> Iterator[list[Place]]:
        for numbers, _ in self.of.dealer.deal(range(len(self.of.rows))):
            yield [Place(0, number) for number in numbers[self.of.read]]
