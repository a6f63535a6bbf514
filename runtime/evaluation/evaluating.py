"""Computes the exact loss over a dataset, without changing the state of the training."""

from __future__ import annotations

import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase

from autopar.runtime.data.batches import Batch
from autopar.runtime.data.loss import Counting, Divisor, ExactBatch, as_counted, scale_loss
from autopar.runtime.evaluation.metrics import Measure, RowMetrics, once, over_ranks
from autopar.runtime.evaluation.rows import EvaluationRows
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.randomness import (
    NoRandomness,
    cpu_generators_restored,
    seed_all,
    seed_cpu_generators,
)
from autopar.runtime.recompute.written_buffers import kept_buffers

__all__ = ["Evaluation", "one_by_one", "with_gradients"]  # for scripts


@contextmanager
def evaluated(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Run the code inside in evaluation mode, without autograd, and restore the model's state."""
    with untouched(parts, mesh, seed):
        for part in parts:
            part.eval()
        yield


@contextmanager
def computes_as_trained(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Make a model compute as in training, but without gradients and random numbers.

    Batch norms use their running statistics: those of a batch would need the rows of all ranks.
    Compiled layers run uncompiled: code compiled without random numbers would be used only once.
    """
    uncompiled = torch.compiler.set_stance("force_eager")
    with untouched(parts, mesh, seed), NoRandomness(), uncompiled:
        for part in parts:
            for module in part.modules():
                module.training &= not isinstance(module, _NormBase)
        yield


@contextmanager
def untouched(parts: Sequence[nn.Module], mesh: Mesh, seed: int) -> Iterator[None]:
    """Restore a model's modes and buffers and the random states afterwards.

    Inside, autograd is off, and the random generators start from `seed`, so that every evaluation
    draws the same numbers.
    """
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    modes = [(module, module.training) for part in parts for module in part.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(cpu_generators_restored())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        for part in parts:
            stack.enter_context(kept_buffers(part))
        seed_cpu_generators(seed)
        seed_all(seed, mesh)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
                if isinstance(module, FSDPModule):  # without a backward, it stays gathered
                    module.reshard()


Losses: TypeAlias = Callable[[Iterable[Batch]], Iterator[Tensor]]  # of microbatches, in order


def weighed_alike(batch: Batch, terms: Counting | None) -> Batch:
    """Return a microbatch with `loss_weights` of 1, if its loss adds up means (`terms` is given).

    There is one weight for each count that `terms` returns.
    """
    if terms is None:
        return batch
    return {**batch, "loss_weights": torch.ones_like(terms(batch), dtype=torch.float64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The result of an evaluation."""

    loss: float
    metrics: Mapping[str, float]
    rows: int
    seconds: float


def one_by_one(loss: Callable[[Batch], Tensor]) -> Losses:
    """Return a function that computes the losses of microbatches one after the other."""
    return partial(map, loss)


def with_gradients(losses: Losses) -> Losses:
    """Return a function that computes losses with autograd on, for a model that uses gradients."""

    @torch.enable_grad()
    def computed(batches: Iterable[Batch]) -> Iterator[Tensor]:
        for loss in losses(batches):
            yield loss.detach()

    return computed


def evaluates_after(step: int, options: Namespace) -> bool:
    """Whether an evaluation follows a step: every --eval-every steps, and after the last step."""
    every = options.eval_every
    return bool(every) and (step % every == 0 or step == options.steps)


class Evaluation:
    """The loss over a dataset, equal to that of one process with all rows in one batch.

    A microbatch is weighted by its rows, or by its valid `targets` if the loss is a mean over
    these. If the loss adds several means, each mean is weighted by its count, which `terms`
    returns. `divisor` turns a count into the number that the loss divides by: the count itself, or
    for example max(count, 1). If the loss is a sum over rows, `microbatches` is the number of
    microbatches in a step of all data ranks: the mean over microbatches is multiplied by it, to be
    comparable with the loss of a step. For other losses it is 1.
    `metrics` computes values from the model's outputs; their means are returned, too.
    """

    def __init__(
        self,
        losses: Losses,
        parts: Sequence[nn.Module],
        rows: EvaluationRows | None,
        *,
        targets: Counting | None = None,
        terms: Counting | None = None,
        divisor: Divisor = as_counted,
        microbatches: int = 1,
        metrics: Measure | None = None,
    ) -> None:
        self._losses, self._parts, self._rows = losses, parts, rows
        self._targets, self._terms, self._divisor = targets, terms, divisor
        self._microbatches, self._measure = microbatches, metrics
        self._all_terms: Tensor | None = None  # counts over all rows

    def is_due(self, step: int) -> bool:
        """Whether the model is to be evaluated after a step."""
        return self._rows is not None and evaluates_after(step, self._rows.options)

    def rehearse(self) -> None:
        """Evaluate one microbatch, so that a fault in metrics() shows before the training."""
        if self._rows is None or self._measure is None:
            return
        metrics = RowMetrics(self._measure, self._rows.mesh)
        with self._untouched(self._rows, metrics):
            batch, times = next(iter(self._rows))
            given = self._rows.to_device(weighed_alike(batch, self._terms))
            _ = list(self._losses([given]))
            metrics.add(self._rows.whole(given), times)

    def run(self) -> Evaluated:
        """Evaluate the model; the training continues unaffected."""
        assert self._rows is not None
        if self._rows.mesh.device.type == "cuda":
            torch.cuda.synchronize()  # pending work belongs to the training's time
        begun = time.perf_counter()
        metrics = RowMetrics(self._measure, self._rows.mesh)
        with self._untouched(self._rows, metrics):
            loss = self._mean(self._rows, metrics)
        return Evaluated(
            loss=loss,
            metrics=metrics.means(),
            rows=self._rows.count,
            seconds=time.perf_counter() - begun,
        )

    @contextmanager
    def _untouched(self, rows: EvaluationRows, metrics: RowMetrics) -> Iterator[None]:
        seed = rows.options.seed
        with evaluated(self._parts, rows.mesh, seed), metrics.watching(self._parts):
            yield

    def _mean(self, rows: EvaluationRows, metrics: RowMetrics) -> float:
        """Return Σ divisor(count) · loss ÷ divisor(Σ count), times `microbatches`.

        The sums are over the microbatches of all data ranks.
        """
        device, divisor = rows.mesh.device, as_counted if self._targets is None else self._divisor
        if self._terms is not None and self._all_terms is None:
            own = [once(self._terms(ExactBatch(batch)).double(), times) for batch, times in rows]
            self._all_terms = over_ranks(torch.stack(own).sum(0).to(device), rows.mesh).cpu()
        total = torch.zeros((), dtype=torch.float64, device=device)
        weight = torch.zeros_like(total)
        for batch, times, given, loss in self._computed(rows):
            count = self._count(batch, rows).to(device, torch.float64, non_blocking=True)
            total += scale_loss(loss.double(), once(divisor(count, 1), times))
            weight += once(count, times)
            metrics.add(rows.whole(given), times)
        total, weight = over_ranks(torch.stack([total, weight]), rows.mesh)
        # over_ranks divides by the number of pipeline ranks, but only the last one has losses
        total *= rows.mesh.pipeline.size
        return float(total / divisor(weight, _parts_of(rows))) * self._microbatches

    def _computed(self, rows: EvaluationRows) -> Iterator[tuple[Batch, int, Batch, Tensor]]:
        """Yield (microbatch, times, the same microbatch on the device, its loss).

        `times` is how often each row occurs in the microbatch: once, or more often if too few rows
        were left to fill it, or 0 if none was left and its rows must not count. A pipeline reads
        several microbatches before it has the loss of the first.
        """
        under_way: deque[tuple[Batch, int, Batch]] = deque()

        def given() -> Iterator[Batch]:
            for batch, times in rows:
                placed = rows.to_device(self._weighed(batch, rows))
                under_way.append((batch, times, placed))
                yield placed

        for loss in self._losses(given()):
            yield *under_way.popleft(), loss

    def _count(self, batch: Batch, rows: EvaluationRows) -> Tensor:
        """Return a microbatch's count: of its rows, or of its valid targets."""
        if self._targets is None:
            return torch.tensor(rows.dealer.size)
        return self._targets(ExactBatch(batch))

    def _weighed(self, batch: Batch, rows: EvaluationRows) -> Batch:
        """Return a microbatch with weights for the means that its loss adds up.

        A microbatch's loss counts by its share of all rows, but each mean in it should count by its
        share of all targets. So a mean's weight is its share of the targets, divided by the
        microbatch's share of the rows.
        """
        if self._terms is None or self._all_terms is None:
            return batch
        parts = _parts_of(rows)
        counts = self._divisor(self._terms(ExactBatch(batch)).double(), 1)
        every = self._divisor(self._all_terms, parts)
        shares = counts / every.masked_fill(every == 0, 1)  # a mean may have no targets at all
        return {**batch, "loss_weights": shares * parts}


def _parts_of(rows: EvaluationRows) -> float:
    """Return how many microbatches of this rank's size hold all rows, perhaps with a fraction."""
    return rows.count / rows.dealer.size
