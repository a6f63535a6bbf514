"""The trainings with which emitted scripts are compared: GPT-2 split by hand with torch's tools.

Every function takes the whole model with its initial weights and returns a step: microbatches in,
the mean loss of this rank out (0 on ranks that do not see it). All of them clip by the global norm
and use the fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

Batch: TypeAlias = Mapping[str, Tensor]
Step: TypeAlias = Callable[[Sequence[Batch]], Tensor]

MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "fused": True}


def data_parallel(model: nn.Module) -> Step:
    """Train with DistributedDataParallel, with gradients as views of its buckets."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    return _step_of(wrapped, model, AdamW(grouped(model.parameters()), **ADAMW))


def zero_1(model: nn.Module) -> Step:
    """Train with DDP and ZeroRedundancyOptimizer, which assigns whole parameters to ranks.

    Its `overlap_with_ddp` is not used: it steps within the backward, before the global norm is
    known.
    """
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        grouped(model.parameters()),
        optimizer_class=AdamW,
        parameters_as_bucket_view=True,
        **ADAMW,
    )
    return _step_of(wrapped, model, optimizer)


def zero_2(model: nn.Module) -> Step:
    """Apply fully_shard to each block; parameters stay gathered from forward to backward."""
    return _fully_sharded(model, frees_after_forward=False)


def zero_3(model: nn.Module) -> Step:
    """Apply fully_shard to each block; parameters are gathered again for the backward."""
    return _fully_sharded(model, frees_after_forward=True)


def _fully_sharded(model: Any, *, frees_after_forward: bool) -> Step:
    for block in model.h:
        fully_shard(block, reshard_after_forward=frees_after_forward)
    fully_shard(model, reshard_after_forward=False)
    return _step_of(model, model, AdamW(grouped(model.parameters()), **ADAMW))


def _step_of(wrapped: Any, model: nn.Module, optimizer: Optimizer) -> Step:
    parameters = list(model.parameters())

    def step(microbatches: Sequence[Batch]) -> Tensor:
        total = torch.zeros(())
        for number, batch in enumerate(microbatches, start=1):
            with _synchronised(wrapped, now=number == len(microbatches)):
                loss = mean_loss(wrapped(batch["input_ids"]), batch) / len(microbatches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip_grad_norm_(parameters, MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _synchronised(wrapped: Any, *, now: bool) -> Any:
    """Return a context whose backward reduces gradients only if `now` is set."""
    if isinstance(wrapped, DistributedDataParallel):
        return nullcontext() if now else wrapped.no_sync()
    wrapped.set_requires_gradient_sync(now)
    return nullcontext()


class FirstHalf(nn.Module):
    """The embeddings and the first half of the blocks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.wte, model.wpe, model.drop
        self.h = model.h[: len(model.h) // 2]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to what the second half takes."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x: Tensor = self.drop(self.wte(input_ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return x


class SecondHalf(nn.Module):
    """The second half of the blocks, and the scores of the vocabulary."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.h = model.h[len(model.h) // 2 :]
        self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Map what the first half gives to logits."""
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def pipeline(model: Any, microbatches: int) -> Step:
    """Train with PipelineStage and Schedule1F1B on two ranks; both hold the tied embedding."""
    rank = dist.get_rank()
    half = FirstHalf(model) if rank == 0 else SecondHalf(model)
    table = model.wte.weight  # tied to lm_head.weight: each rank holds a copy
    others = [parameter for parameter in half.parameters() if parameter is not table]
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_logits_loss)
    optimizer = AdamW(grouped(half.parameters()), **ADAMW)

    def step(batches: Sequence[Batch]) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(torch.cat([batch["input_ids"] for batch in batches]))
        else:
            labels = torch.cat([batch["labels"] for batch in batches])
            schedule.step(target=labels, losses=losses, return_outputs=False)
        dist.all_reduce(table.grad)
        squares = get_total_norm(gradients_of(others)).square()
        dist.all_reduce(squares)
        norm = (squares + table.grad.norm().square()).sqrt()
        clip_grads_with_norm_(half.parameters(), MAX_NORM, norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


def _logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return _logits_loss(logits, batch["labels"])


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def grouped(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay for matrices, but not for biases and norms."""
    every = list(parameters)
    return [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
