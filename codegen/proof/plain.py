"""A training as a person writes it for one device: plain PyTorch around a model file's functions.

Nothing that scripts run is used here but the numbering of random draws (`plain_model`), so a fault
of the runtime shows as a difference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only

from autopar.codegen.proof.plain_rows import Batch, plain_batches
from autopar.planner.model.model_file import ModelFile
from autopar.planner.ops import Ref
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.chosen import USUAL, Usual
from autopar.planner.plan.telling.meaning import narrowed_buffers
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.weights.plain_model import plain_model

HALVES = (torch.bfloat16, torch.float16)


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
    clip_norm: float | None = 1.0  # at which a script clips gradients
    usual: Usual = USUAL  # where the model file has no optimizer
    half_buffers: tuple[str, ...] = ()  # that a plan in 16 bits holds so
    device: str = "cpu"


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
        half_buffers=tuple(one.name for one in narrowed_buffers(plan)),
    )


def build_alone(file: ModelFile, task: Task) -> nn.Module:
    """Return the user's model on a device, in the types that it was built in."""
    return plain_model(file.build_model, seed=task.seed).to(task.device)


def batches_of(file: ModelFile, task: Task) -> Iterator[Batch]:
    """Yield the global batches of a training, on its device, with what is no tensor in them."""
    rows = plain_batches(file, rows=task.rows, seed=task.seed, uses_dataset=task.uses_dataset)
    with seeded(task.seed):
        plain = file.plain_entries()
    return ({**{k: one.to(task.device) for k, one in batch.items()}, **plain} for batch in rows)


def cast_model(model: nn.Module, task: Task) -> nn.Module:
    """Give a model the type of a task, as far as a training in that has it; return the model.

    In 16 bits norms with running statistics are left as they are, and buffers but for those that
    the plan holds so. In float64 complex numbers are pairs of that.
    """
    dtype: torch.dtype = getattr(torch, task.dtype)
    tensors = [*model.parameters(), *model.buffers()]
    if dtype in HALVES:
        norms = [one for one in model.modules() if getattr(one, "track_running_stats", False)]
        wide = {id(one) for norm in norms for one in norm.parameters()}
        buffers = dict(model.named_buffers())
        tensors = [one for one in model.parameters() if id(one) not in wide]
        tensors += [buffers[name] for name in task.half_buffers]
    for tensor in tensors:
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.promote_types(dtype, torch.complex64))
        elif tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def loss_of(model: nn.Module, file: ModelFile, batch: Batch, task: Task) -> Tensor:
    """Return the loss of a batch; a model in 16 bits takes it so, its loss function in 32."""
    given = {key: _taken(batch[key], task) for key in task.keys if key in batch}
    outputs = model(**given, **dict(task.plain))
    if file.loss is not None:
        outputs = file.loss(tree_map_only(Tensor, _single, outputs), batch)
    loss: Tensor = _loss_in(outputs)
    return loss


def optimizer_of(file: ModelFile, model: nn.Module, task: Task) -> Optimizer:
    """Return the optimizer of the model file, or AdamW as scripts have it."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if file.build_optimizer is None:
        return _usual_optimizer([one for _, one in named], task.usual)
    asked = next(iter(inspect.signature(file.build_optimizer).parameters), "")
    given: Mapping[str, Any] = {"model": model, "named_parameters": named}
    made: Optimizer = file.build_optimizer(given.get(asked, [one for _, one in named]))
    return made


def scheduler_of(
    file: ModelFile, optimizer: Optimizer, task: Task, *, steps: int
) -> LRScheduler | None:
    """Return what sets the learning rates of a training of so many steps."""
    if file.build_scheduler is not None:
        made: LRScheduler = file.build_scheduler(optimizer)
        return made
    return None if file.build_optimizer is not None else _usual_rates(optimizer, task.usual, steps)


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model holds when it is built: what it trains, and plain tensors of modules."""
    plain = {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    return {**dict(trained_tensors(model)), **plain}


def trained_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers under all their names.

    How many batches a batch norm has seen is left out: that counts microbatches.
    """
    counts = {
        id(module.num_batches_tracked)
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    }
    buffers = model.named_buffers(remove_duplicate=False)
    return [
        *model.named_parameters(remove_duplicate=False),
        *((name, buffer) for name, buffer in buffers if id(buffer) not in counts),
    ]


def _usual_optimizer(parameters: list[nn.Parameter], usual: Usual) -> AdamW:
    matrices: dict[str, Any] = {"params": [one for one in parameters if one.dim() >= 2]}
    vectors = {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0}
    return AdamW(
        [matrices, vectors],
        lr=usual.learning_rate,
        betas=usual.betas,
        weight_decay=usual.weight_decay,
    )


def _usual_rates(optimizer: Optimizer, usual: Usual, steps: int) -> LambdaLR:
    warmup, last = min(usual.warmup_steps, steps // 10), usual.final_share

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        share = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return last + (1 - last) * math.cos(share * math.pi / 2) ** 2

    return LambdaLR(optimizer, factor)


def _loss_in(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    return outputs[0] if loss is None else loss


def _taken(value: Tensor, task: Task) -> Tensor:
    dtype: torch.dtype = getattr(torch, task.dtype)
    return value.to(dtype) if dtype in HALVES and value.is_floating_point() else value


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
