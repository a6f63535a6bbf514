"""Collectives as emitted scripts call them on CPUs, for a profile to measure."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.planner.cluster.link import Collective, Manner
from autopar.runtime.ranks import transport
from autopar.runtime.ranks.mesh import Axis


def training_call(
    manner: Manner, collective: Collective, payload_bytes: int, rank: int, ranks: int
) -> Callable[[], Tensor]:
    """Return one call on fp32 tensors; the payload is as planner/costs/collectives counts it."""
    axis = Axis(rank=rank, size=ranks, group=dist.group.WORLD, is_gloo=True)
    stack = torch.ones(ranks, max(1, payload_bytes // 4 // ranks))
    flat = stack.view(-1)
    waited: dict[Collective, Callable[[], Tensor]] = {
        Collective.ALL_REDUCE: lambda: transport.summed(stack, axis),
        Collective.ALL_GATHER: lambda: transport.gathered(stack[rank], axis),
        Collective.REDUCE_SCATTER: lambda: transport.sum_scattered(stack, axis),
        Collective.ALL_TO_ALL: lambda: transport.exchanged(stack, axis),
    }
    of_a_bucket: dict[Collective, Callable[[], Tensor]] = {
        Collective.ALL_REDUCE: lambda: transport.ComingSum(flat, axis).value(),
        Collective.ALL_GATHER: lambda: _gathered(flat, axis),
        Collective.REDUCE_SCATTER: lambda: transport.ComingPart(flat, axis).value(),
    }
    return {Manner.WAITED: waited, Manner.BUCKET: of_a_bucket}[manner][collective]


def _gathered(flat: Tensor, axis: Axis) -> Tensor:
    work = transport.started_gather(flat, axis)
    if work is not None:
        work.wait()
    return flat
