"""Trains a model file on one device as a person would write it in plain PyTorch.

It uses the runtime only for seeds, for the numbering of random draws (`plain_model`), and to read
streamed or collated rows. Faults in the rest of the runtime therefore show as differences. Rows
come in the scripts' order: the seed decides the permutation of each epoch, and the random numbers
of each row.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, default_collate

from autopar.codegen.proof.draws import DrawRecorder, NotedDraw
from autopar.codegen.proof.exactness import (
    HALVES,
    ExactMode,
    KeepFloat64,
    all_steps,
    all_tensors,
    cast_batch,
    clipped_share,
    trained_tensors,
    wide_copies,
    wide_copy,
)
from autopar.codegen.proof.plain_sums import SentGradients, SentSums, sent_sums
from autopar.codegen.proof.replicas import LocalSteps, PlayedOuter, local_steps, shared_out
from autopar.planner.axes.infer import infer_axes
from autopar.planner.graph.graph import Graph
from autopar.planner.graph.ops import Ref
from autopar.planner.layers import find_layers, float8_linears
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import ADAMW, AdamWDefaults, narrowed_buffers
from autopar.planner.precision import Float8
from autopar.runtime.data.batches import dataset_batches
from autopar.runtime.data.epochs import Dealing, Epochs
from autopar.runtime.ranks.mesh import start, stop
from autopar.runtime.ranks.randomness import (
    cpu_generators_restored,
    mixed_seed,
    seed_cpu_generators,
    seeded,
)
from autopar.runtime.weights.plain_model import plain_model

Batch: TypeAlias = dict[str, Tensor]


def plain_batches(file: ModelFile, *, rows: int, seed: int, uses_dataset: bool) -> Iterator[Batch]:
    """Yield global batches without end; the tensors of a batch share no memory."""
    with seeded(seed):
        found = file.example_batch(rows)
    example = {key: one for key, one in found.items() if isinstance(one, Tensor)}
    if file.build_dataset is None or not uses_dataset:
        while True:
            yield {key: one.clone() for key, one in example.items()}
    with seeded(seed):
        dataset = file.build_dataset()
    is_listed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if is_listed and file.build_collate is None and not hasattr(dataset, "__getitems__"):
        places = _places(len(dataset), seed)
        while True:
            chosen = [_row(dataset, example, place, seed) for place in islice(places, rows)]
            yield {key: one.clone() for key, one in default_collate(chosen).items()}
    yield from _as_scripts_do(file, dataset, rows, seed)


def _places(length: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the epoch and the index of each row."""
    for epoch in count():
        numbers = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        for row in torch.randperm(length, generator=numbers).tolist():
            yield epoch, row


def _row(
    dataset: Any, example: Mapping[str, Tensor], place: tuple[int, int], seed: int
) -> Mapping[str, Tensor]:
    """Read a row of a dataset, with the example's keys and dtypes."""
    with cpu_generators_restored():
        seed_cpu_generators(mixed_seed(seed, *place))
        row = dataset[place[1]]
    return {key: torch.as_tensor(row[key], dtype=one.dtype) for key, one in example.items()}


def _as_scripts_do(file: ModelFile, dataset: Any, rows: int, seed: int) -> Iterator[Batch]:
    """Yield batches of streamed or collated rows, read with the code that scripts use."""
    mesh = start(pipeline=1, data=1, tensor=1)
    try:
        yield from dataset_batches(
            dataset,
            file.example_batch,
            mesh,
            dealing=Dealing(each=(rows,), rank=0),
            epochs=Epochs(rows=None, per_step=rows),
            seed=seed,
            new_collate=file.build_collate,
        )
    finally:
        stop(mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings of a training in one process."""

    spec: str
    arguments: tuple[str, ...]
    keys: tuple[str, ...]  # keys of the batch that the model takes
    plain: tuple[tuple[str, Any], ...]  # arguments that are no tensors, the same for every batch
    rows: int  # the whole global batch: there are no microbatches
    steps: int
    uses_dataset: bool
    dtype: str
    seed: int = 0
    clip_norm: float | None = 1.0  # as in the script
    adamw: AdamWDefaults = ADAMW  # used if the model file has no optimizer
    half_buffers: tuple[str, ...] = ()  # buffers that a 16-bit plan casts
    scaling: str = Float8.NONE.value  # of the linear layers in `float8_layers`
    float8_layers: tuple[str, ...] = ()
    device: str = "cpu"
    local: LocalSteps | None = None
    sums: SentSums | None = None  # how data ranks compress gradients

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the training."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def task_of(
    plan: Plan, spec: str, *, steps: int, uses_dataset: bool = True, dtype: str = "float64"
) -> Task:
    """Return the settings of a plan's training in one process; `spec` is the model file."""
    keywords, float8 = plan.graph.calls[""].keywords, plan.arrangement.float8
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
        scaling=float8.value,
        float8_layers=() if float8 is Float8.NONE else _float8_layers(plan.graph, float8),
        local=local_steps(plan) if plan.arrangement.is_local else None,
        sums=sent_sums(plan),
    )


def _float8_layers(graph: Graph, float8: Float8) -> tuple[str, ...]:
    return tuple(float8_linears(graph, find_layers(graph, infer_axes(graph)), float8).values())


def build_alone(file: ModelFile, task: Task) -> nn.Module:
    """Return the user's model on the task's device, in its original dtypes."""
    return plain_model(file.build_model, seed=task.seed).to(task.device)


def batches_of(file: ModelFile, task: Task) -> Iterator[Batch]:
    """Yield a training's global batches on its device, including entries that are no tensors."""
    rows = plain_batches(file, rows=task.rows, seed=task.seed, uses_dataset=task.uses_dataset)
    with seeded(task.seed):
        plain = file.plain_entries()
    return ({**{k: one.to(task.device) for k, one in batch.items()}, **plain} for batch in rows)


def cast_model(model: nn.Module, task: Task) -> nn.Module:
    """Cast a model to a task's dtype as scripts do, and return it.

    In 16 bits, norms with running statistics and most buffers keep their dtypes. In float64,
    complex tensors become complex128.
    """
    dtype = task.torch_dtype
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
    """Return a batch's loss; a 16-bit model gets 16-bit inputs, and its loss gets fp32 outputs."""
    given = {key: _taken(batch[key], task) for key in task.keys if key in batch}
    outputs = model(**given, **dict(task.plain))
    if file.loss is not None:
        outputs = file.loss(tree_map_only(Tensor, _single, outputs), batch)
    loss: Tensor = _loss_in(outputs)
    return loss


def optimizer_of(file: ModelFile, model: nn.Module, task: Task) -> Optimizer:
    """Return the model file's optimizer, or the scripts' AdamW."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if file.build_optimizer is None:
        return _default_optimizer([one for _, one in named], task.adamw)
    asked = next(iter(inspect.signature(file.build_optimizer).parameters), "")
    given: Mapping[str, Any] = {"model": model, "named_parameters": named}
    made: Optimizer = file.build_optimizer(given.get(asked, [one for _, one in named]))
    return made


def scheduler_of(
    file: ModelFile, optimizer: Optimizer, task: Task, *, steps: int
) -> LRScheduler | None:
    """Return the learning-rate scheduler of a training of `steps` steps, if it has one."""
    if file.build_scheduler is not None:
        made: LRScheduler = file.build_scheduler(optimizer)
        return made
    if file.build_optimizer is not None:
        return None
    return _default_rates(optimizer, task.adamw, steps)


def _default_optimizer(parameters: list[nn.Parameter], adamw: AdamWDefaults) -> AdamW:
    matrices: dict[str, Any] = {"params": [one for one in parameters if one.dim() >= 2]}
    vectors = {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0}
    return AdamW(
        [matrices, vectors],
        lr=adamw.learning_rate,
        betas=adamw.betas,
        weight_decay=adamw.weight_decay,
    )


def _default_rates(optimizer: Optimizer, adamw: AdamWDefaults, steps: int) -> LambdaLR:
    warmup, last = min(adamw.warmup_steps, steps // 10), adamw.final_share

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
    is_cast = task.torch_dtype in HALVES and value.is_floating_point()
    return value.to(task.torch_dtype) if is_cast else value


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedAlone:
    """The numbers that one process computed; its draws are those of one additional step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # of all gradients, before clipping
    gradients: Mapping[str, Tensor]  # of the first step, clipped
    parameters: Mapping[str, Tensor]  # and buffers, after the last step
    initial: Mapping[str, Tensor]  # parameters, buffers and plain tensors before the first step
    draws: tuple[NotedDraw, ...] = ()
    others: tuple[TrainedAlone, ...] = ()  # replicas after the first, if they take local steps


class _Replica:
    """A model and its optimizer: one for all rows, or with local steps one for each replica."""

    def __init__(self, file: ModelFile, task: Task) -> None:
        self.file, self.task = file, task
        self.model = cast_model(build_alone(file, task), task)
        self.initial = wide_copies(all_tensors(self.model))
        self.optimizer = optimizer_of(file, self.model, task)
        self.scheduler = scheduler_of(file, self.optimizer, task, steps=all_steps(task.steps))
        self.sent = SentGradients(task.sums)
        self.norms: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def learn(self, batch: Batch, weight: float) -> float:
        """Take a step, and return the weighted loss."""
        dtype = self.task.torch_dtype
        with ExactMode(dtype):
            weighted = partial(self._weighted, weight)
            loss = self.sent.backward(self.model, weighted, cast_batch(batch, dtype))
        self.norms.append(_clipped(self.model, self.task, len(self.norms) + 1))
        self.gradients = self.gradients or _gradients(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.item()

    def _weighted(self, weight: float, batch: Batch) -> Tensor:
        return loss_of(self.model, self.file, batch, self.task) * weight


def train_alone(task: Task) -> TrainedAlone:
    """Train the user's model in a plain loop around the user's functions.

    With local steps, this process plays all replicas, one after another.
    """
    file = load_model_file(task.spec, task.arguments)
    replicas = [_Replica(file, task) for _ in (task.local.rows if task.local else [()])]
    models = [one.model for one in replicas]
    outer = None if task.local is None else PlayedOuter(models, task.local)
    batches, losses = batches_of(file, task), []
    for step, batch in enumerate(islice(batches, task.steps), start=1):
        parts = [(batch, 1.0)] if task.local is None else shared_out(batch, task.local)
        pairs = zip(replicas, parts, strict=True)
        losses.append(sum(one.learn(*part) for one, part in pairs) / len(replicas))
        if outer is not None:
            outer.step_parts(step)
    parameters = [wide_copies(dict(trained_tensors(one))) for one in models]
    batch = cast_batch(next(batches), task.torch_dtype)
    with DrawRecorder(unseeded=-1) as drawing, KeepFloat64(task.torch_dtype):
        loss_of(replicas[0].model, file, batch, task).backward()  # type: ignore[no-untyped-call]
    first, *others = (
        TrainedAlone(
            losses=tuple(losses),
            norms=tuple(one.norms),
            gradients=one.gradients,
            parameters=learnt,
            initial=one.initial,
        )
        for one, learnt in zip(replicas, parameters, strict=True)
    )
    return replace(first, draws=drawing.draws([replicas[0].model]), others=tuple(others))


def _clipped(model: nn.Module, task: Task, step: int) -> float:
    """Clip the gradients to a fraction of their norm, and return the norm."""
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
