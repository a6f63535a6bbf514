"""Trains a model file in one process by plain PyTorch, exactly: each script must equal that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autopar.codegen.proof.draws import Draw, Drawing
from autopar.codegen.proof.exactness import Exactly, Widely
from autopar.codegen.proof.plain import (
    Task,
    batches_of,
    build_alone,
    cast_model,
    held_tensors,
    loss_of,
    optimizer_of,
    scheduler_of,
    trained_tensors,
)
from autopar.codegen.proof.plain_rows import Batch
from autopar.planner.model.model_file import load_model_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one process saw and made; what it drew is of one step more."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before each step clips them
    gradients: Mapping[str, Tensor]  # of the first step, clipped
    parameters: Mapping[str, Tensor]  # after the last, and buffers
    initial: Mapping[str, Tensor]  # parameters, buffers and plain tensors before the first
    draws: tuple[Draw, ...] = ()


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
    """Train the user's model, as the user builds it, in a loop around the user's functions."""
    file = load_model_file(task.spec, task.arguments)
    dtype: torch.dtype = getattr(torch, task.dtype)
    model = cast_model(build_alone(file, task), task)
    initial = wide_copies(held_tensors(model))
    batches = batches_of(file, task)
    optimizer = optimizer_of(file, model, task)
    scheduler = scheduler_of(file, optimizer, task, steps=all_steps(task.steps))
    losses, norms, gradients = [], [], dict[str, Tensor]()
    for step, batch in enumerate(islice(batches, task.steps), start=1):
        with Exactly(dtype):
            loss = loss_of(model, file, cast_batch(batch, dtype), task)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        norms.append(_clipped(model, task, step))
        gradients = gradients or _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    parameters = wide_copies(dict(trained_tensors(model)))
    batch = cast_batch(next(batches), dtype)
    with Drawing(unseeded=-1) as drawing, Widely(dtype):
        loss_of(model, file, batch, task).backward()  # type: ignore[no-untyped-call]
    return Trained(
        losses=tuple(losses),
        norms=tuple(norms),
        gradients=gradients,
        parameters=parameters,
        initial=initial,
        draws=drawing.draws([model]),
    )


def cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    """Give the fractions of a batch a type that holds more than theirs."""

    def wide(one: Tensor) -> Tensor:
        return one.to(dtype) if one.is_floating_point() and one.itemsize < dtype.itemsize else one

    wide_batch: Batch = tree_map_only(Tensor, wide, batch)  # which has plain numbers, too
    return wide_batch


def wide_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors, in a type that holds the numbers of all others."""
    return {name: wide_copy(one) for name, one in tensors.items()}


def wide_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, in a type that holds the numbers of all others."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", wide, copy=True)


def _clipped(model: nn.Module, task: Task, step: int) -> float:
    """Clip the gradients to a share of their norm, and return that."""
    parameters = list(model.parameters())
    for one in parameters:
        if one.grad is not None and one.grad.is_sparse:
            one.grad = one.grad.to_dense()
    norm = nn.utils.clip_grad_norm_(parameters, math.inf)
    if task.clip_norm:
        nn.utils.clip_grad_norm_(parameters, float(norm) * clipped_share(step))
    return float(norm)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: wide_copy(one.grad) for name, one in named if one.grad is not None}
