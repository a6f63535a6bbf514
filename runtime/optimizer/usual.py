"""Makes what a training has whose model file has no optimizer: AdamW, and its learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> AdamW:
    """Build AdamW that decays matrices, but neither norms nor biases.

    A parameter has as many dims on every rank as in the model. Pieces of it take its place in its
    group later.
    """
    every = list(parameters)
    matrices: dict[str, Any] = {"params": [one for one in every if one.dim() >= 2]}
    others = {"params": [one for one in every if one.dim() < 2], "weight_decay": 0.0}
    return AdamW([matrices, others], lr=lr, betas=betas, weight_decay=weight_decay)


def warmup_cosine(optimizer: Optimizer, *, steps: int, warmup: int, final: float) -> LambdaLR:
    """Build a schedule: linearly up to the optimizer's rates, then down along a cosine.

    The last of the `steps` has `final` times the highest rate. The warm-up takes a tenth of the
    steps at most. Each rate follows from the number of the step and of all `steps` alone: a
    training that goes on with more steps has the rates of one that had so many from the start.
    """
    warmup = min(warmup, steps // 10)

    def factor(taken: int) -> float:
        if taken < warmup:
            return (taken + 1) / (warmup + 1)
        progress = min(1.0, (taken - warmup) / max(1, steps - 1 - warmup))
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, factor)
