"""Trains a model file in one process by plain PyTorch: what every plan's script must equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopar.codegen.proof.draws import Draw, Drawing
from autopar.codegen.proof.exactness import Exactly, Widely
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.ops import Ref
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.chosen import USUAL, Usual
from autopar.runtime.data.batches import Batch, dataset_batches, placed, synthetic_batches
from autopar.runtime.data.loss import in_float32, loss_in
from autopar.runtime.data_parallel.buckets import HALF_DTYPES
from autopar.runtime.optimizer.arguments import OptimizerFactory, made_optimizer
from autopar.runtime.optimizer.usual import adamw, warmup_cosine
from autopar.runtime.ranks.mesh import Mesh, start, stop
from autopar.runtime.weights.initial_weights import build

_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a training in one process needs to know of a plan."""

    spec: str
    arguments: tuple[str, ...]
    keys: tuple[str, ...]  # of the batch, that the model takes
    plain: tuple[tuple[str, Any], ...]  # arguments that are no tensors, the same for every batch
    rows: int  # the whole global batch: one process has no microbatches
    steps: int
    uses_dataset: bool
    dtype: str
    seed: int = 0
    clips: bool = True
    usual: Usual = USUAL  # where the model file has no optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one process saw and made; what it drew is of one step more."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before each step clips them
    gradients: Mapping[str, Tensor]  # of the first step, clipped
    parameters: Mapping[str, Tensor]  # after the last
    draws: tuple[Draw, ...] = ()


def task_of(
    plan: Plan, spec: str, *, steps: int, uses_dataset: bool = True, dtype: str = "float64"
) -> Task:
    """Return the training of a plan as one process can do it; `spec` is where the model lies."""
    keywords = plan.graph.calls[""].keywords
    return Task(
        spec=spec,
        arguments=tuple(f"{key}={value}" for key, value in plan.model.arguments),
        keys=tuple(name for name, value in keywords if isinstance(value, Ref)),
        plain=tuple((name, value) for name, value in keywords if not isinstance(value, Ref)),
        rows=plan.arrangement.global_batch,
        steps=steps,
        uses_dataset=uses_dataset,
        dtype=dtype,
    )


def all_steps(exact: int) -> int:
    """Return of how many steps a proved training is: so many, and one whose draws are recorded."""
    return exact + 1


def clipped_share(step: int) -> float:
    """Return to which share of its norm a step clips its gradients, where it is proved.

    A norm that is always larger lets every clip bite, and shares that change from step to step show
    one that is missing, wrong or too late: Adam does not notice a factor that stays.
    """
    return 1 / (step + 1)


def train_alone(task: Task) -> Trained:
    """Train the user's model with the user's functions; of ours is only the order of the data."""
    file = load_model_file(task.spec, task.arguments)
    dtype: torch.dtype = getattr(torch, task.dtype)
    mesh = start(pipeline=1, data=1, tensor=1)
    model = build(file.build_model, seed=task.seed).to(mesh.device, dtype)
    batches = (placed(batch, mesh, dtype) for batch in _batches(file, task, mesh))
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = made_optimizer(file.build_optimizer or _usual(task), [model], learning)
    scheduler = _scheduler(file, task, optimizer)
    losses, norms, gradients = [], [], dict[str, Tensor]()
    for step in range(1, task.steps + 1):
        batch = next(batches)
        with Exactly(dtype):
            losses.append(_accumulate(model, file.loss, batch, task))
        norms.append(_clipped(model, task, step))
        gradients = gradients or _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    parameters = {name: _kept(value) for name, value in trained_tensors(model)}
    batch = next(batches)
    with Drawing(unseeded=-1) as drawing, Widely(dtype):
        _accumulate(model, file.loss, batch, task)
    stop(mesh)
    return Trained(
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=gradients,
        parameters=parameters,
        draws=drawing.draws([model]),
    )


def _batches(file: ModelFile, task: Task, mesh: Mesh) -> Iterator[Batch]:
    if file.build_dataset is not None and task.uses_dataset:
        return dataset_batches(
            file.build_dataset,
            file.example_batch,
            mesh,
            microbatch=task.rows,
            seed=task.seed,
            new_collate=file.build_collate,
        )
    return synthetic_batches(file.example_batch, mesh, rows=(1, task.rows), seed=task.seed)


def _accumulate(
    model: nn.Module, loss_function: Callable[..., Any] | None, batch: Batch, task: Task
) -> float:
    """Leave the gradients of the global batch in the model, and return its loss."""
    tensors = {key: _halved(batch[key], task) for key in task.keys if key in batch}
    outputs = model(**tensors, **dict(task.plain))
    loss: Tensor = in_float32(loss_function)(outputs, batch) if loss_function else loss_in(outputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _clipped(model: nn.Module, task: Task, step: int) -> float:
    """Clip the gradients to a share of their norm, and return that."""
    parameters = list(model.parameters())
    norm = nn.utils.clip_grad_norm_(parameters, math.inf)
    if task.clips:
        nn.utils.clip_grad_norm_(parameters, float(norm) * clipped_share(step))
    return float(norm)


def _halved(value: Tensor, task: Task) -> Tensor:
    """Return an argument as a model in 16 bits takes it."""
    dtype: torch.dtype = getattr(torch, task.dtype)
    return value.to(dtype) if dtype in HALF_DTYPES and value.is_floating_point() else value


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: _kept(p.grad) for n, p in trained_tensors(model) if p.grad is not None}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double().clone()


def _usual(task: Task) -> OptimizerFactory:
    usual = task.usual
    return partial(
        adamw, lr=usual.learning_rate, betas=usual.betas, weight_decay=usual.weight_decay
    )


def _scheduler(file: ModelFile, task: Task, optimizer: Optimizer) -> LRScheduler | None:
    if file.build_scheduler is not None:
        made: LRScheduler = file.build_scheduler(optimizer)
        return made
    if file.build_optimizer is not None:
        return None
    usual, steps = task.usual, all_steps(task.steps)
    return warmup_cosine(optimizer, steps=steps, warmup=usual.warmup_steps, final=usual.final_share)


def trained_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters under all their names, and the running statistics of batch norms."""
    statistics = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith(_STATISTICS)
    ]
    return [*model.named_parameters(remove_duplicate=False), *statistics]
