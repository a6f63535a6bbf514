"""Trains a model file in one process by plain PyTorch: what every plan's script must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from autopar.codegen.proof.exactness import Exactly
from autopar.codegen.script.settings_lines import has_batch_norm
from autopar.planner.axes.infer import infer_axes
from autopar.planner.axes.terms import leaves
from autopar.planner.costs.collectives.norm_statistics import BATCH_NORM
from autopar.planner.graph import Graph, Ref
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.runtime.buckets import HALF_DTYPES
from autopar.runtime.data import dataset_batches, placed, synthetic_batches
from autopar.runtime.initial_weights import build
from autopar.runtime.loss import loss_in
from autopar.runtime.mesh import start, stop
from autopar.runtime.optimizer_arguments import made_optimizer

SEED, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY = 0, 1.0, 3e-4, 0.1  # as scripts have them


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a training in one process needs to know of a plan."""

    spec: str
    arguments: tuple[str, ...]
    keys: tuple[str, ...]  # of the batch, that the model takes
    plain: tuple[tuple[str, Any], ...]  # arguments that are no tensors, the same for every batch
    block: int  # rows of one microbatch of all data ranks
    blocks: int
    norms_blocks: bool  # whether batch norm gives each block statistics of its own
    runs_blocks: bool  # and only running each block by itself does that
    steps: int
    uses_dataset: bool
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The losses of every step, the clipped gradients of the first, the parameters of the last."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def task_of(
    plan: Plan, spec: str, *, steps: int, uses_dataset: bool = True, dtype: str = "float64"
) -> Task:
    """Return the training of a plan as one process can do it; `spec` is where the model lies."""
    arranged, keywords = plan.arrangement, plan.graph.calls[""].keywords
    return Task(
        spec=spec,
        arguments=tuple(f"{key}={value}" for key, value in plan.model.arguments),
        keys=tuple(name for name, value in keywords if isinstance(value, Ref)),
        plain=tuple((name, value) for name, value in keywords if not isinstance(value, Ref)),
        block=arranged.microbatch * arranged.data,
        blocks=arranged.microbatches,
        norms_blocks=has_batch_norm(plan.graph),
        runs_blocks=_norms_again(plan.graph) or _norms_across(plan.graph),
        steps=steps,
        uses_dataset=uses_dataset,
        dtype=dtype,
    )


def _norms_again(graph: Graph) -> bool:
    """Whether a batch norm keeps statistics more than once in a forward."""
    kept = [op.writes for op in graph.ops if op.target == BATCH_NORM and op.writes]
    return len(set(kept)) < len(kept)


def _norms_across(graph: Graph) -> bool:
    """Whether a batch norm finds the rows of a block apart: time·batch, with the batch inside."""
    norms = [op for op in graph.ops if op.target == BATCH_NORM]
    dims = infer_axes(graph).dims if norms else {}
    of_rows = [
        [not leaf.size.is_constant for leaf in leaves(dims[op.inputs[0]][0])] for op in norms
    ]
    return any(True in found and not found[0] for found in of_rows)


def train_alone(task: Task) -> Trained:
    """Train the user's model with the user's functions; of ours is only the order of the data."""
    file = load_model_file(task.spec, task.arguments)
    dtype: torch.dtype = getattr(torch, task.dtype)
    model = build(file.build_model, seed=SEED).to(dtype)
    mesh = start(pipeline=1, data=1, tensor=1)
    if file.build_dataset is not None and task.uses_dataset:
        if file.build_collate is not None:  # rows are padded to the longest of the global batch
            task = replace(task, block=task.block * task.blocks, blocks=1)
        batches = dataset_batches(
            file.build_dataset,
            file.example_batch,
            mesh,
            microbatch=task.block,
            seed=SEED,
            new_collate=file.build_collate,
        )
    else:
        batches = synthetic_batches(
            file.example_batch, mesh, rows=(task.blocks, task.block), seed=SEED
        )
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = made_optimizer(file.build_optimizer or _adamw, [model], learning)
    scheduler = file.build_scheduler(optimizer) if file.build_scheduler else None
    losses, gradients = [], dict[str, Tensor]()
    for _ in range(task.steps):
        blocks = [placed(batch, mesh, dtype) for batch in islice(batches, task.blocks)]
        with Exactly(dtype):
            losses.append(_accumulate(model, file.loss, blocks, task))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        gradients = gradients or _gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    stop(mesh)
    parameters = {name: value.detach().double() for name, value in trained_tensors(model)}
    return Trained(losses=tuple(losses), gradients=gradients, parameters=parameters)


def _accumulate(
    model: nn.Module,
    loss_function: Callable[..., Any] | None,
    blocks: list[dict[str, Tensor]],
    task: Task,
) -> float:
    """Leave the gradients of the global batch in the model, and return its loss."""
    groups = [[block] for block in blocks] if task.runs_blocks else [blocks]
    total = 0.0
    for group in groups:
        batch = {key: torch.cat([block[key] for block in group]) for key in group[0]}
        tensors = {key: _halved(batch[key], task) for key in task.keys if key in batch}
        with normed_in_blocks(len(group) if task.norms_blocks else 1):
            outputs = model(**tensors, **dict(task.plain))
            loss = loss_in(outputs) if loss_function is None else loss_function(outputs, batch)
            (loss / len(groups)).backward()
        total += loss.item() / len(groups)
    return total


@contextmanager
def normed_in_blocks(blocks: int) -> Iterator[None]:
    """Have batch norm take its statistics of one block of the rows after another.

    So a loss of all rows can be had though each microbatch is normed by itself; the mean of the
    microbatches' losses is another one where their rows do not count alike.
    """
    plain = torch.batch_norm

    def blockwise(x: Tensor, *args: Any) -> Tensor:
        return torch.cat([plain(block, *args) for block in x.chunk(blocks)])

    with patch.object(torch, "batch_norm", blockwise if blocks > 1 else plain):
        yield


def _halved(value: Tensor, task: Task) -> Tensor:
    """Return an argument as a model in 16 bits takes it."""
    dtype: torch.dtype = getattr(torch, task.dtype)
    return value.to(dtype) if dtype in HALF_DTYPES and value.is_floating_point() else value


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.double().clone() for n, p in trained_tensors(model) if p.grad is not None}


def _adamw(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def trained_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters under all their names, and the running statistics of batch norms."""
    statistics = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    ]
    return [*model.named_parameters(remove_duplicate=False), *statistics]
