"""Measures what the host takes beside ops: for a layer that runs again, or a backward in halves.

Nearly all of it is Python of torch, so it depends on how many ops a layer has, not on their sizes:
the blocks that are measured are too small to compute anything to speak of. Left out: a backward in
halves holds gradients where a whole one writes into memory that it has just freed. Whether a host
has to clear other pages for them depends on what its process freed before.
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

from autopar.planner.costs.ops.measurements import PassTimes

Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
Clock: TypeAlias = Callable[[], float]
_BLOCKS = 6
_HEADS = 2
_SIZES = (1, 2, 8)  # rows of how many positions of which width
_OPS = 21  # of a block, as a traced graph counts them
_REPEATS = 24


class _Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width, device=device)
        self.qkv = nn.Linear(width, 3 * width, device=device)
        self.out = nn.Linear(width, width, device=device)
        self.norm_2 = nn.LayerNorm(width, device=device)
        self.up = nn.Linear(width, width, device=device)
        self.down = nn.Linear(width, width, device=device)

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
    blocks, x = _blocks(device)
    forward, plain, full, selective, whole, inputs, weights = _in_turns(
        partial(_forward_seconds, blocks, x, now),
        partial(_both_seconds, blocks, x, now, None),
        partial(_both_seconds, blocks, x, now, _plain),
        partial(_both_seconds, blocks, x, now, _selective),
        partial(_whole_seconds, blocks, x, now),
        partial(_halves_seconds, blocks, x, now),
    )
    return PassTimes(
        checkpoint_seconds=max(0.0, full - plain - forward) / (2 * _BLOCKS),
        selective_seconds=max(0.0, selective - full) / (2 * _BLOCKS * _OPS),
        split_input_seconds=max(0.0, inputs - whole) / (_BLOCKS * _OPS),
        split_weight_seconds=weights / (_BLOCKS * _OPS),
    )


def _blocks(device: str) -> tuple[list[nn.Module], Tensor]:
    """Return some blocks, and what the first one gets."""
    blocks: list[nn.Module] = [_Block(_SIZES[-1], device) for _ in range(_BLOCKS)]
    return blocks, torch.zeros(_SIZES, device=device, requires_grad=True)


def _in_turns(*ways: Callable[[], tuple[float, ...]]) -> list[float]:
    rounds = [[seconds for way in ways for seconds in way()] for _ in range(_REPEATS)]
    return list(map(_calm, zip(*rounds, strict=True)))


def _calm(seconds: Sequence[float]) -> float:
    """Return the lower quartile: differences of a few per cent drown in what others disturb."""
    return sorted(seconds)[len(seconds) // 4]


def _forward_seconds(blocks: list[nn.Module], x: Tensor, now: Clock) -> tuple[float]:
    began = now()
    _run(blocks, x)
    return (now() - began,)


def _both_seconds(
    blocks: list[nn.Module], x: Tensor, now: Clock, contexts: Contexts | None
) -> tuple[float]:
    began = now()
    if contexts is None:
        y = _run(blocks, x)
    else:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False, context_fn=contexts)
    y.sum().backward()  # type: ignore[no-untyped-call]
    return (now() - began,)


def _whole_seconds(blocks: list[nn.Module], x: Tensor, now: Clock) -> tuple[float]:
    y = _run(blocks, x)
    began = now()
    stage_backward((y,), (torch.ones_like(y),), [x])
    return (now() - began,)


def _halves_seconds(blocks: list[nn.Module], x: Tensor, now: Clock) -> tuple[float, float]:
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    y = _run(blocks, x)
    began = now()
    gradients: Any = [torch.ones_like(y)]
    _, groups = stage_backward_input([y], gradients, [x], iter(parameters))
    middle = now()
    stage_backward_weight(iter(parameters), groups)
    return middle - began, now() - middle


def _run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


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
