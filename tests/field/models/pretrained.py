"""A family of Hugging Face that begins from a folder; one tensor is its tokens and its labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from tests.field.families import family_named
from tests.planner.huggingface.decoders import LENGTH, VOCAB
from tests.planner.huggingface.family import token_ids

IGNORED, ITEMS = -100, 128


class Rows(Dataset[dict[str, Tensor]]):
    """Random tokens, of which the first few are no targets: as many as the row says."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        ids = torch.randint(4, VOCAB - 4, (LENGTH,), generator=drawn)
        labels = ids.clone()
        labels[: index % (LENGTH - 2)] = IGNORED
        return {"input_ids": ids, "labels": labels}


def build_model(family: str, base: str) -> nn.Module:
    """Return the model that lies in a folder."""
    kind: Any = family_named(family).model_class
    model: nn.Module = kind.from_pretrained(base, dtype=torch.float32).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return tokens that are their own labels, as one tensor."""
    ids = token_ids(batch_size, LENGTH, VOCAB)
    return {"input_ids": ids, "labels": ids}


def build_dataset() -> Rows:
    """Return the rows."""
    return Rows()


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer that does not enlarge what is rounded."""
    return SGD(params, lr=0.1)
