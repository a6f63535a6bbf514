"""Collectives as emitted scripts call them on CPUs, for a profile to measure."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.planner.costs.collective_measured import Collective
from autopar.runtime import transport
from autopar.runtime.mesh import Axis


def training_call(
    collective: Collective, payload_bytes: int, rank: int, ranks: int
) -> Callable[[], object]:
    """Return one call on fp32 tensors; the payload is what planner/costs/collectives.py says."""
    axis = Axis(rank=rank, size=ranks, group=dist.group.WORLD, is_gloo=True)
    stack = torch.ones(ranks, max(1, payload_bytes // 4 // ranks))
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: transport.summed(stack, axis),
        Collective.ALL_GATHER: lambda: transport.gathered(stack[rank], axis),
        Collective.REDUCE_SCATTER: lambda: transport.sum_scattered(stack, axis),
        Collective.ALL_TO_ALL: lambda: transport.exchanged(stack, axis),
    }
    return calls[collective]
