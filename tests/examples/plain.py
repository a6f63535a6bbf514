"""Trains an example by the loop that a person would write for one device."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.telling.words import CLIP_NORM
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.weights.plain_model import plain_model

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What the loop saw and made."""

    losses: tuple[float, ...]
    model: nn.Module


def train_plainly(file: ModelFile, *, steps: int, rows: int, rate: float) -> Plain:
    """Train so many steps, each on a whole batch of rows, in the order that scripts have."""
    model = plain_model(file.build_model, seed=SEED)
    assert file.build_dataset is not None
    assert file.build_optimizer is not None
    dataset = file.build_dataset()
    numbers = torch.Generator().manual_seed(mixed_seed(SEED, 0))
    order = torch.randperm(len(dataset), generator=numbers).tolist()
    optimizer = file.build_optimizer([one for one in model.parameters() if one.requires_grad])
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses = []
    for _ in range(steps):
        batch = default_collate([dataset[order.pop(0)] for _ in range(rows)])
        loss = _loss(file, model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Plain(losses=tuple(losses), model=model)


def _loss(file: ModelFile, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    named = inspect.signature(model.forward).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in named.values())
    found: Any = model(**{key: one for key, one in batch.items() if takes_all or key in named})
    if file.loss is not None:
        found = file.loss(found, batch)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss
