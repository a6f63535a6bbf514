"""The training loop that a person writes for one device. It has nothing of autopar's."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

STEPS, GLOBAL_BATCH, CLIP = 3, 8, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training saw, and what it left."""

    losses: tuple[float, ...]
    evaluated: Mapping[str, float]  # the loss and the metrics of rows that are evaluated
    weights: Mapping[str, Tensor]


def train(path: Path, *, clip: float = CLIP) -> Trained:
    """Train what a model file builds, in fp32, and evaluate it after the last step."""
    file = _imported(path)
    model: nn.Module = file.build_model()
    optimizer, scheduler = _optimizer(file, model)
    batches, losses = _batches(file), []
    for _ in range(STEPS):
        loss = _loss(file, _outputs(model, batch := next(batches)), batch)
        torch.autograd.backward(loss)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(
        losses=tuple(losses),
        evaluated=_evaluated(file, model) if hasattr(file, "build_eval_dataset") else {},
        weights=model.state_dict(),
    )


def _imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"plain_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(file: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the batch of each step: the order of rows is that of the docs."""
    example = file.example_batch(2)
    if not hasattr(file, "build_dataset"):
        _seed(0)
        batch = file.example_batch(GLOBAL_BATCH)
        while True:
            yield batch
    _seed(0)
    dataset = file.build_dataset()
    collate = file.build_collate() if hasattr(file, "build_collate") else _stacked(example)
    found = _rows(dataset)
    while True:
        rows = [next(found) for _ in range(GLOBAL_BATCH)]
        yield {**_plain(example), **collate(rows)}


def _rows(dataset: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        if not hasattr(dataset, "__len__"):
            yield from _drawn_for(epoch, enumerate(dataset))
        else:
            numbers = torch.Generator().manual_seed(_mixed(0, epoch))
            order = torch.randperm(len(dataset), generator=numbers).tolist()
            yield from _drawn_for(epoch, ((row, None) for row in order), dataset)
        epoch += 1


def _drawn_for(epoch: int, rows: Iterator[tuple[int, Any]], dataset: Any = None) -> Iterator[Any]:
    for number, row in rows:
        _seed(_mixed(0, epoch, number))
        yield row if dataset is None else dataset[number]


def _mixed(*numbers: int) -> int:
    digest = hashlib.blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _stacked(example: Mapping[str, Any]) -> Callable[[list[Any]], Mapping[str, Any]]:
    keys = [key for key, value in example.items() if isinstance(value, Tensor)]

    def stacked(rows: list[Any]) -> Mapping[str, Any]:
        tensors = [{k: torch.as_tensor(row[k]).to(example[k].dtype) for k in keys} for row in rows]
        batch: Mapping[str, Any] = default_collate(tensors)
        return batch

    return stacked


def _plain(example: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in example.items() if not isinstance(value, Tensor)}


def _outputs(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(model.forward).parameters
    return model(**{key: value for key, value in batch.items() if key in parameters})


def _loss(file: Any, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    found: Any = outputs
    if hasattr(file, "loss"):
        found = file.loss(outputs, batch)
    elif isinstance(outputs, Mapping):
        found = outputs["loss"]
    elif not isinstance(outputs, Tensor):
        found = outputs.loss if hasattr(outputs, "loss") else outputs[0]
    assert isinstance(found, Tensor)
    return found


def _optimizer(file: Any, model: nn.Module) -> tuple[Optimizer, Any]:
    learning = [one for one in model.parameters() if one.requires_grad]
    if not hasattr(file, "build_optimizer"):
        optimizer = _usual(learning)
        own = None if hasattr(file, "build_scheduler") else LambdaLR(optimizer, _share)
    else:
        asked = next(iter(inspect.signature(file.build_optimizer).parameters))
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        given = {"model": model, "named_parameters": named}.get(asked, learning)
        optimizer, own = file.build_optimizer(given), None
    return optimizer, file.build_scheduler(optimizer) if hasattr(file, "build_scheduler") else own


def _usual(learning: list[nn.Parameter]) -> AdamW:
    """Return the AdamW that scripts have where a model file has no optimizer."""
    vectors = {"params": [one for one in learning if one.dim() < 2], "weight_decay": 0.0}
    matrices: dict[str, Any] = {"params": [one for one in learning if one.dim() >= 2]}
    return AdamW([matrices, vectors], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


def _share(step: int) -> float:
    """Return the share of the learning rate that a step has: along a cosine to a tenth."""
    progress = min(1.0, step / (STEPS - 1))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def _evaluated(file: Any, model: nn.Module) -> Mapping[str, float]:
    """Return the loss and the metrics of all rows in one batch."""
    model.eval()
    example = file.example_batch(2)
    collate = file.build_collate() if hasattr(file, "build_collate") else _stacked(example)
    batch = {**_plain(example), **collate(list(file.build_eval_dataset()))}
    outputs = _outputs(model, batch)
    found = {"loss": float(_loss(file, outputs, batch))}
    if hasattr(file, "metrics"):
        measured = file.metrics(outputs, batch)
        found |= {name: float(value.double().mean()) for name, value in measured.items()}
    return found
