"""Says how many rows each step takes, where an epoch is one time through the rows of a dataset."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import repeat
from math import ceil
from typing import Any

from autopar.runtime.data.dataset_rows import is_streamed
from autopar.runtime.ranks.refusal import refuse


class LastRows(StrEnum):
    """What becomes of the rows at the end of an epoch that are too few for a step."""

    RUN_ON = "run-on"  # they fill a step together with rows of the next epoch
    DROP = "drop"  # no step has them
    PAD = "pad"  # they are a step of their own, whose loss is that of these rows alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """How the rows of a dataset make up steps.

    A position is a number of rows: those of whole epochs, and those of the epoch that has begun.
    Rows that are dropped count as passed. `rows` may be None, not known, where steps run on.
    """

    rows: int | None
    per_step: int
    last: LastRows = LastRows.RUN_ON

    def passes(self, begun: int) -> Iterator[tuple[int | None, Iterator[int]]]:
        """Yield the rows that are left of each epoch, and the rows of each step that takes them.

        Steps that run on are those of one epoch without an end, whose rows are None.
        """
        if self.rows is None or self.last is LastRows.RUN_ON:
            yield None, repeat(self.per_step)
            return
        left = self.rows - begun % self.rows
        while True:
            yield left, self._steps(left)
            left = self.rows

    def last_steps(self, begun: int) -> set[int]:
        """Return the rows of last steps that are padded, of the epoch that has begun and others."""
        if self.rows is None or self.last is not LastRows.PAD:
            return set()
        lefts = (self.rows % self.per_step, (self.rows - begun % self.rows) % self.per_step)
        return {left for left in lefts if left}

    def position(self, begun: int, steps: int) -> int:
        """Return the position after so many steps from another one."""
        if self.rows is None or self.last is LastRows.RUN_ON:
            return begun + steps * self.per_step
        first = self._count(self.rows - begun % self.rows)
        if steps < first:
            return begun + steps * self.per_step
        whole, rest = divmod(steps - first, self._count(self.rows))
        return (begun // self.rows + 1 + whole) * self.rows + rest * self.per_step

    def steps_until(self, epochs: Fraction, begun: int) -> int:
        """Return how many steps it takes from a position until so many epochs have passed."""
        assert self.rows is not None
        target = ceil(epochs * self.rows)
        if target <= begun:
            return 0
        if self.last is LastRows.RUN_ON:
            return _ceil(target - begun, self.per_step)
        (epoch, row), (last, part) = divmod(begun, self.rows), divmod(target, self.rows)
        if last == epoch:
            return min(_ceil(part - row, self.per_step), self._count(self.rows - row))
        whole = (last - epoch - 1) * self._count(self.rows)
        rest = min(_ceil(part, self.per_step), self._count(self.rows))
        return self._count(self.rows - row) + whole + rest

    def _count(self, rows: int) -> int:
        """Return how many steps take so many rows at the end of an epoch."""
        return rows // self.per_step if self.last is LastRows.DROP else _ceil(rows, self.per_step)

    def _steps(self, rows: int) -> Iterator[int]:
        whole, left = divmod(rows, self.per_step)
        yield from repeat(self.per_step, whole)
        if left and self.last is LastRows.PAD:
            yield left


def epochs_of(dataset: Any, options: Namespace, rows_per_step: int) -> Epochs:
    """Return how a dataset makes up steps; leave where the options ask for what it cannot.

    Without a dataset (None) steps run on.
    """
    if dataset is None:
        return Epochs(rows=None, per_step=rows_per_step)
    last, is_counted = LastRows(options.last_rows), options.epochs is not None
    if last is LastRows.RUN_ON and not is_counted:
        return Epochs(rows=None, per_step=rows_per_step)
    rows, name = known_length(dataset), f"the dataset ({type(dataset).__name__})"
    if rows is None:
        refuse(
            f"{'--epochs' if is_counted else f'--last-rows {last}'} is for a dataset whose rows "
            f"are counted, and {name} has no length",
            fix="give it __len__, or train by --steps alone",
        )
    if rows < rows_per_step and last is LastRows.DROP:
        refuse(
            f"{name} has {rows:,} rows, fewer than the {rows_per_step:,} of a step: --last-rows "
            "drop leaves none of them",
            fix="--last-rows pad or run-on, or plan for a smaller --global-batch",
        )
    return Epochs(rows=rows, per_step=rows_per_step, last=last)


def known_length(dataset: Any) -> int | None:
    """Return how many rows a dataset has; None for a stream that does not tell."""
    if not is_streamed(dataset):
        return len(dataset)
    try:
        return len(dataset) or None
    except (TypeError, NotImplementedError):  # torch's own streams raise either
        return None


def _ceil(rows: int, per_step: int) -> int:
    return -(-rows // per_step)
