"""Trains a model file in 16 bits with plain PyTorch and fp32 masters, like a 16-bit script.

If the plan multiplies in float8, so does this training, with torchao. The training and the script
are both compared with the same training in fp32, without float8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.codegen.proof.exactness import HALVES, ExactMode
from autopar.codegen.proof.plain import (
    Task,
    batches_of,
    build_alone,
    cast_model,
    loss_of,
    optimizer_of,
    scheduler_of,
)
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.runtime.model.parts import use_float8

FIRST_SCALE = 2.0**15  # of a loss in fp16: without it, gradients would underflow


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainHalf:
    """The tensors and losses of a training in one process; a tied tensor has its first name."""

    initial: Mapping[str, Tensor]
    types: Mapping[str, str]  # of the buffers
    losses: tuple[float, ...]
    final: Mapping[str, Tensor]
    dtype: str
    frozen: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Both:
    """The fp32 model that the optimizer steps, and the 16-bit model that computes."""

    masters: nn.Module
    computing: nn.Module

    def copies(self) -> dict[str, Tensor]:
        """Copy the fp32 parameters, the frozen ones in 16 bits, and the buffers."""
        computing = dict(self.computing.named_parameters())
        parameters = {
            name: one if one.requires_grad else computing[name]
            for name, one in self.masters.named_parameters()
        }
        every = {**parameters, **dict(self.computing.named_buffers())}
        return {name: one.detach().clone() for name, one in every.items()}

    @property
    def pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of both models' parameters."""
        return zip(self.masters.parameters(), self.computing.parameters(), strict=True)


def train_in_half(task: Task) -> tuple[PlainHalf, PlainHalf]:
    """Return a training in a task's 16-bit dtype and float8 layers, and one in fp32."""
    return _trained(task), _trained(replace(task, dtype="float32", float8_layers=()))


def _trained(task: Task) -> PlainHalf:
    file = load_model_file(task.spec, task.arguments)
    both = _built(file, task)
    initial = both.copies()
    buffers = both.computing.named_buffers()
    types = {name: str(one.dtype).removeprefix("torch.") for name, one in buffers}
    losses = _losses(file, both, task)
    named = both.masters.named_parameters()
    return PlainHalf(
        initial=initial,
        types=types,
        losses=losses,
        final=both.copies(),
        dtype=task.dtype,
        frozen=frozenset(name for name, one in named if not one.requires_grad),
    )


def _built(file: ModelFile, task: Task) -> _Both:
    is_half = task.torch_dtype in HALVES
    masters = build_alone(file, task)
    for parameter in masters.parameters():
        if parameter.dtype in HALVES:
            parameter.data = parameter.data.float()
    computing = cast_model(build_alone(file, task), task) if is_half else masters
    if task.float8_layers:
        use_float8(computing, task.float8_layers, task.scaling)
    return _Both(masters, computing)


def _losses(file: ModelFile, both: _Both, task: Task) -> tuple[float, ...]:
    """Train, and return the loss of each step."""
    batches = batches_of(file, task)
    optimizer = optimizer_of(file, both.masters, task)
    scheduler = scheduler_of(file, optimizer, task, steps=task.steps)
    scale, losses = FIRST_SCALE if task.torch_dtype is torch.float16 else 1.0, []
    for batch in islice(batches, task.steps):
        with ExactMode(task.torch_dtype):
            loss = loss_of(both.computing, file, batch, task)
            (loss.float() * scale).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if _stepped(both, optimizer, task, scale):
            if scheduler is not None:
                scheduler.step()
        else:
            scale /= 2
    return tuple(losses)


def _stepped(both: _Both, optimizer: Optimizer, task: Task, scale: float) -> bool:
    """Step the masters and copy them, rounded, to the 16-bit model; False if gradients overflow."""
    for master, parameter in both.pairs:
        gradient, parameter.grad = parameter.grad, None
        master.grad = None if gradient is None else gradient.float() / scale
    gradients = [one.grad for one in both.masters.parameters() if one.grad is not None]
    fits = all(bool(gradient.isfinite().all()) for gradient in gradients)
    if fits:
        if task.clip_norm:
            nn.utils.clip_grad_norm_(both.masters.parameters(), task.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in both.pairs:
                parameter.copy_(master)
    optimizer.zero_grad()
    return fits
