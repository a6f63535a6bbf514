"""Measures what the host takes beside ops: for a layer that runs again, or a backward in halves.

All of it is Python of torch, so it depends on how many ops a layer has, not on their sizes: the
block that is measured is too small to compute anything to speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.planner.costs.measurements import PassTimes

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Clock: TypeAlias = Callable[[], float]
_BLOCKS = 6
_HEADS, _WIDTH = 2, 8
_OPS = 21  # of a block, as a traced graph counts them
_REPEATS = 24


class _Block(nn.Module):
    """A transformer's block."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH, device=device)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, device=device)
        self.out = nn.Linear(_WIDTH, _WIDTH, device=device)
        self.norm_2 = nn.LayerNorm(_WIDTH, device=device)
        self.up = nn.Linear(_WIDTH, _WIDTH, device=device)
        self.down = nn.Linear(_WIDTH, _WIDTH, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return something of the same shape."""
        batch, rows, _ = x.shape
        q, k, v = (
            one.view(batch, rows, _HEADS, -1).transpose(1, 2)
            for one in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(y.transpose(1, 2).reshape(batch, rows, -1))
        x = x + nn.functional.dropout(y, 0.1)
        y = self.down(nn.functional.gelu(self.up(self.norm_2(x))))
        return x + nn.functional.dropout(y, 0.1)


def pass_times(device: str, now: Clock) -> PassTimes:
    """Return the host's times, which differ from those of the same passes done plainly."""
    model = nn.Sequential(*(_Block(device) for _ in range(_BLOCKS)))
    x = torch.zeros(1, 2, _WIDTH, device=device, requires_grad=True)
    blocks = list(model)
    ways: list[Callable[[], float]] = [
        partial(_forward_seconds, blocks, x, now),
        partial(_both_seconds, blocks, x, now, None),
        partial(_both_seconds, blocks, x, now, _plain),
        partial(_both_seconds, blocks, x, now, _selective),
        partial(_backward_seconds, blocks, x, now, _whole),
        partial(_backward_seconds, blocks, x, now, _halves),
    ]
    rounds = [[way() for way in ways] for _ in range(_REPEATS)]  # they take turns
    forward, plain, full, selective, whole, halves = map(_calm, zip(*rounds, strict=True))
    return PassTimes(
        checkpoint_seconds=max(0.0, full - plain - forward) / (2 * _BLOCKS),
        selective_seconds=max(0.0, selective - full) / (2 * _BLOCKS * _OPS),
        split_seconds=max(0.0, halves - whole) / (_BLOCKS * _OPS),
    )


def _calm(seconds: Sequence[float]) -> float:
    """Return the lower quartile: differences of a few per cent drown in what others disturb."""
    return sorted(seconds)[len(seconds) // 4]


def _forward_seconds(blocks: list[nn.Module], x: Tensor, now: Clock) -> float:
    began = now()
    _run(blocks, x)
    return now() - began


def _both_seconds(
    blocks: list[nn.Module], x: Tensor, now: Clock, contexts: Contexts | None
) -> float:
    began = now()
    if contexts is None:
        y = _run(blocks, x)
    else:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False, context_fn=contexts)
    y.sum().backward()  # type: ignore[no-untyped-call]
    return now() - began


def _backward_seconds(
    blocks: list[nn.Module],
    x: Tensor,
    now: Clock,
    backward: Callable[[Tensor, Tensor, list[nn.Parameter]], None],
) -> float:
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    y = _run(blocks, x)
    began = now()
    backward(x, y, parameters)
    return now() - began


def _run(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _whole(x: Tensor, y: Tensor, parameters: list[nn.Parameter]) -> None:
    del parameters
    stage_backward((y,), (torch.ones_like(y),), [x])


def _halves(x: Tensor, y: Tensor, parameters: list[nn.Parameter]) -> None:
    gradients: Any = [torch.ones_like(y)]
    _, groups = stage_backward_input([y], gradients, [x], iter(parameters))
    stage_backward_weight(iter(parameters), groups)


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
