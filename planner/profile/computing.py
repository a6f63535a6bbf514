"""Computes for a while, as a layer of a small model does, between what a rank measures."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autopar.planner.profile.net_rank import slowest

_WIDTH = 192
_TURNS = 24


def computation(seconds: float) -> Callable[[], None]:
    """Return what computes for about so long, equally much on all ranks of the group."""
    x, weight = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH)

    def compute(turns: int) -> None:
        for _ in range(turns):
            torch.nn.functional.gelu(x @ weight)

    compute(_TURNS)  # which warms up
    began = time.perf_counter()
    compute(_TURNS)
    each = slowest((time.perf_counter() - began) / _TURNS, "cpu")
    turns = max(1, round(seconds / each))
    return lambda: compute(turns)
