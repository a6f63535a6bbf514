"""A model file with one fault, on all ranks or on one: the environment says which and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.utils.data import Dataset, IterableDataset

FAULT, AT_RANK = os.environ.get("FAULT", ""), os.environ.get("FAULT_RANK", "")
WORDS, LENGTH = 32, 6


def has(fault: str) -> bool:
    """Whether this rank has a fault."""
    return fault == FAULT and AT_RANK in ("", os.environ.get("RANK", "0"))


if has("import"):
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


for fault, words in {
    "other steps": ["--steps", "5"],
    "other data": ["--data", "synthetic"],
    "other checkpoint": ["--checkpoint", "kept"],
    "other export": ["--export", "w.safetensors"],
}.items():
    sys.argv += words if has(fault) else []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        if has("forward"):
            raise RuntimeError("no forward")
        if has("forward exits"):
            raise SystemExit(0)
        x = self.embed(ids)
        x = x + self.hidden(x).relu()
        scores: Tensor = self.head(x)
        return scores


def build_model() -> nn.Module:
    if has("build_model"):
        raise ValueError("no model")
    return Model()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    ids = torch.arange(batch_size * LENGTH).view(batch_size, LENGTH) % WORDS
    return {"ids": ids, "labels": ids}


def loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def broken(row: dict[str, Any]) -> Any:
    """Return a row as a fault makes it."""
    if has("raises"):
        raise KeyError("the third")
    if has("exits"):
        raise SystemExit(0)
    if has("killed"):
        os.kill(os.getpid(), 9)
    if has("none"):
        return None
    if has("key"):
        del row["labels"]
    if has("dtype"):
        row["labels"] = row["labels"].float()
    if has("shape"):
        row["labels"] = row["labels"][:2]
    if has("dims"):
        row["labels"] = row["labels"][None]
    if has("text"):
        row["labels"] = "three"
    if has("target"):
        row["labels"] = row["labels"] + 1000
    if has("id"):
        row["ids"] = row["ids"] - 1000
    return row


class Rows(Dataset[Any]):
    def __len__(self) -> Any:
        if has("length -3"):
            return -3
        if has("length 6.5"):
            return 6.5
        if has("length 0"):
            return 0
        if has("length 10^12"):
            return 10**12
        return 64 + (has("length") and 1)

    def __getitem__(self, index: int) -> Any:
        row = {"ids": torch.arange(LENGTH) + index % 16, "labels": torch.arange(LENGTH)}
        return broken(row) if index % 4 == 3 else row


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (Rows()[index] for index in range(64))


def build_dataset() -> Any:
    if has("build_dataset"):
        raise OSError("no disk")
    if has("no dataset"):
        return None
    return Stream() if FAULT.startswith("stream") else Rows()


def build_eval_dataset() -> Any:
    return [] if has("no rows to evaluate") else Rows()


def metrics(outputs: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if has("metrics"):
        return {"hits": batch["nothing"]}
    hits = outputs.argmax(-1) == batch["labels"]
    return {"hits": hits.float().mean() if has("a single number") else hits}


class OwnSGD(SGD):
    def step(self, closure: Any = None) -> Any:
        if has("step"):
            raise ZeroDivisionError("no step")
        return super().step(closure)


def build_optimizer(params: Iterable[nn.Parameter]) -> Any:
    every: list[Any] = list(params)
    if has("build_optimizer"):
        raise ValueError("no optimizer")
    if has("twice"):
        every = [{"params": every}, {"params": every[:1]}]
    if has("no optimizer"):
        return None
    return (SGD if has("other optimizer") else OwnSGD)(every, lr=0.2 if has("other rate") else 0.1)


def build_scheduler(optimizer: Optimizer) -> LRScheduler:
    if has("build_scheduler"):
        raise ValueError("no scheduler")
    if has("ends"):
        return OneCycleLR(optimizer, 0.1, total_steps=2, cycle_momentum=False)

    def factor(step: int) -> float:
        return 1 / (step - 2) if has("schedule") else 1.0

    return LambdaLR(optimizer, factor)
