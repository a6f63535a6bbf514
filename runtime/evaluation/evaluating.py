"""Turns a model and the rows that it is evaluated on into its loss over all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from autopar.runtime.data.batches import Batch
from autopar.runtime.data.loss import Exact, scale_loss, with_added
from autopar.runtime.evaluation.rows import EvaluationRows
from autopar.runtime.evaluation.untouched import evaluated
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import summed

Counting: TypeAlias = Callable[[Mapping[str, Any]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What an evaluation has found."""

    loss: float
    rows: int
    seconds: float


class Evaluation:
    """The loss over a dataset, as one process would find it that has all of its rows at once.

    Each microbatch weighs by its rows, or by the `targets` that its mean counts; where a loss adds
    several means up, each of those weighs by its own count among the `terms`. `added` is what the
    loss adds to a count before it divides. A loss that is a sum is told as that of a step of the
    training, which has so many `microbatches` on all data ranks together.
    """

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        parts: Sequence[nn.Module],
        rows: EvaluationRows | None,
        *,
        targets: Counting | None = None,
        terms: Counting | None = None,
        added: float | Sequence[float] = 0.0,
        microbatches: int = 1,
    ) -> None:
        self._loss, self._parts, self._rows = loss, parts, rows
        self._targets, self._terms, self._added = targets, terms, added
        self._microbatches = microbatches
        self._all_terms: Tensor | None = None  # their counts of all rows

    def is_due(self, step: int) -> bool:
        """Whether the model is to be evaluated after a step: after every so many, and the last."""
        if self._rows is None:
            return False
        options = self._rows.options
        return bool(step % options.eval_every == 0 or step == options.steps)

    def run(self) -> Evaluated:
        """Evaluate the model as it is; its training goes on as if nothing had been."""
        assert self._rows is not None
        if self._rows.mesh.device.type == "cuda":
            torch.cuda.synchronize()  # what is left to do is of the training
        begun = time.perf_counter()
        with evaluated(self._parts, self._rows.mesh, self._rows.options.seed):
            loss = self._mean(self._rows)
        seconds = time.perf_counter() - begun
        return Evaluated(loss=loss, rows=self._rows.count, seconds=seconds)

    def _mean(self, rows: EvaluationRows) -> float:
        """Return Σ weight · loss ÷ Σ weight over the microbatches of all data ranks."""
        device, added = rows.mesh.device, 0.0 if self._targets is None else self._added
        if self._terms is not None and self._all_terms is None:
            own = [_once(self._terms(Exact(batch)).double(), times) for batch, times in rows]
            self._all_terms = _over_ranks(torch.stack(own).sum(0).to(device), rows.mesh).cpu()
        total = torch.zeros((), dtype=torch.float64, device=device)
        weight = torch.zeros_like(total)
        for batch, times in rows:
            count = self._count(batch, rows).to(device, torch.float64)
            loss = self._loss(rows.placed(self._weighed(batch, rows))).double()
            total += scale_loss(loss, _once(with_added(count, added), times))
            weight += _once(count, times)
        total, weight = _over_ranks(torch.stack([total, weight]), rows.mesh)
        total *= rows.mesh.pipeline.size  # only the last of its ranks has losses
        return float(total / with_added(weight, added)) * self._microbatches

    def _count(self, batch: Batch, rows: EvaluationRows) -> Tensor:
        """Return how much of a microbatch its mean counts."""
        if self._targets is None:
            return torch.tensor(rows.dealer.size)
        return self._targets(Exact(batch))

    def _weighed(self, batch: Batch, rows: EvaluationRows) -> Batch:
        """Return a microbatch with a weight for each mean that its loss adds up.

        The microbatch weighs by its rows, and all of them are rows.count: over all microbatches,
        each mean is to weigh by count ÷ the counts of all rows.
        """
        if self._terms is None or self._all_terms is None:
            return batch
        counts = with_added(self._terms(Exact(batch)), self._added)
        every = with_added(self._all_terms, self._added)
        shares = counts / every.masked_fill(every == 0, 1)  # a mean may have no targets at all
        return {**batch, "loss_weights": shares * (rows.count / rows.dealer.size)}


def _once(count: Tensor, times: int) -> Tensor:
    """Return what rows count that a microbatch has so many times; 0 times, they count nothing."""
    return count / times if times else torch.zeros_like(count)


def _over_ranks(own: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over data ranks of what is the same on the other axes."""
    every = summed(own, mesh.world) if mesh.world.size > 1 else own
    return every / (mesh.tensor.size * mesh.pipeline.size)
