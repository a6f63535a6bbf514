"""Measures what selective recompute adds to the dispatch of each op."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
_BLOCKS = 32
_WIDTH = 8
_OPS = 5  # of a block, as a traced graph counts them
_REPEATS = 15


class _Block(nn.Module):
    """A perceptron as layers have them, too small to compute anything to speak of."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH, device=device)
        self.linear = nn.Linear(_WIDTH, _WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return something of the same shape."""
        y = nn.functional.gelu(self.linear(self.norm(x)))
        return x + nn.functional.dropout(y, 0.1)


def selective_seconds(device: str, now: Callable[[], float]) -> float:
    """Return by how much longer the host takes for an op: in the forward, or when that runs again.

    Both passes go through modes of torch that Python runs for every op; what an op of a graph is
    made of (a product, its bias, its views) counts with it.
    """
    model = nn.Sequential(*(_Block(device) for _ in range(_BLOCKS)))
    x = torch.zeros(1, _WIDTH, device=device, requires_grad=True)

    def taken(contexts: Contexts) -> float:
        began = now()
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
        return now() - began

    pairs = [(taken(_plain), taken(_selective)) for _ in range(_REPEATS)]
    more = median(selective for _, selective in pairs) - median(plain for plain, _ in pairs)
    return max(0.0, more) / (2 * _BLOCKS * _OPS)


def _plain() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        is_kept = op.name().partition("::")[2].partition(".")[0] in ("mm", "addmm")
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts  # torch gives it no types
    first, again = contexts(policy)
    return first, again
