"""Measures what fully_shard takes its host for a unit, beside the collectives.

A unit takes  a + b · bytes  to gather (its hooks, the copy to where parameters are used) and
likewise to scatter (hooks, the copy of gradients to where they are sent): units of two sizes tell
a and b. A group of one process does all of it but send.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from autopar.planner.costs.measurements import UnitTimes

_UNITS = 6
_TENSORS = 8  # of a unit, about as many as a transformer block has
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 16, 2**16  # of a tensor
_REPEATS = 9
_WARM_UP = 2


class _Unit(nn.Module):
    """Adds its parameters to what comes in."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elements) for _ in range(_TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        for weight in self.weights:
            x = x + weight
        return x


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The seconds of a unit's forward and backward."""

    forward_seconds: float
    backward_seconds: float


def unit_times() -> UnitTimes:
    """Return the times of this host's CPU, which does all the copying itself."""
    with _alone() as mesh:
        small, large = (_added(elements, mesh) for elements in (_SMALL_ELEMENTS, _LARGE_ELEMENTS))
    more_bytes = 4 * _TENSORS * (_LARGE_ELEMENTS - _SMALL_ELEMENTS)
    gather_byte = max(0.0, large.forward_seconds - small.forward_seconds) / more_bytes
    both_byte = max(0.0, large.backward_seconds - small.backward_seconds) / more_bytes
    return UnitTimes(
        gather_seconds=small.forward_seconds,
        scatter_seconds=max(0.0, small.backward_seconds - small.forward_seconds),
        gather_byte_seconds=gather_byte,
        scatter_byte_seconds=max(0.0, both_byte - gather_byte),
    )


def _added(elements: int, mesh: DeviceMesh) -> _Pass:
    """Return what sharding adds to the passes of one unit; its backward gathers again."""
    plain, sharded = _passes(elements, None), _passes(elements, mesh)
    return _Pass(
        forward_seconds=max(0.0, sharded.forward_seconds - plain.forward_seconds),
        backward_seconds=max(0.0, sharded.backward_seconds - plain.backward_seconds),
    )


def _passes(elements: int, mesh: DeviceMesh | None) -> _Pass:
    model = nn.Sequential(*(_Unit(elements) for _ in range(_UNITS)))
    if mesh is not None:
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.zeros(elements)
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(_WARM_UP + _REPEATS):
        began = time.thread_time()
        loss = model(x).sum()
        middle = time.thread_time()
        loss.backward()
        backward.append(time.thread_time() - middle)
        forward.append(middle - began)
        model.zero_grad()
    return _Pass(
        forward_seconds=median(forward[_WARM_UP:]) / _UNITS,
        backward_seconds=median(backward[_WARM_UP:]) / _UNITS,
    )


@contextmanager
def _alone() -> Iterator[DeviceMesh]:
    """Provide a group of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield DeviceMesh("cpu", [0])
        finally:
            dist.destroy_process_group()
