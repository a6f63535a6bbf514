"""Runs opened classes on several ranks: each holds its shards, and reports loss and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.codegen.forward.opened import OpenedSource
from autopar.runtime.model.parts import shard_parameters
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.tensor.shards import Split
from tests.codegen.forward.running import (
    accepted,
    float64_batch,
    float64_model,
    loss_of,
    namespace,
    stage_modules,
    staged_loss,
    use_classes,
)
from tests.planner.subjects import zoo_file

Cuts = dict[str, tuple[int, tuple[tuple[int, int], ...]]]


def rank_result(
    name: str, arguments: tuple[str, ...], opened: OpenedSource, cuts: Cuts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's loss and the gradients of what it holds."""
    torch.set_num_threads(1)
    file = zoo_file(name, *arguments)
    model, batch = float64_model(file), float64_batch(file)
    axis = Axis(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)
    splits = {key: Split(dim=dim, parts=parts) for key, (dim, parts) in cuts.items()}
    found: dict[str, Any] = namespace(opened)
    roots = [stage.cls for stage in opened.stages] if len(opened.stages) == 1 else []
    use_classes(model, (*opened.classes, *roots), found, axis)
    shard_parameters(model, splits, axis)
    if len(opened.stages) > 1:
        loss = staged_loss(file, stage_modules(model, opened, found, axis), opened, batch)
    elif opened.loss is not None:
        loss = found["split_loss"](model(**accepted(model, batch)), batch, axis)
    elif opened.stages and opened.stages[-1].returns_loss:
        loss = model(**accepted(model, batch))
    else:
        loss = loss_of(file, model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }
    return loss.detach(), grads
