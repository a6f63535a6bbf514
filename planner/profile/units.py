"""Measures what fully_shard takes its host for a unit, beside the collectives.

A unit takes  a + b · bytes  to gather (its hooks, the copy to where parameters are used) and
likewise to scatter (hooks, the copy of gradients to where they are sent): units of two sizes tell
a and b. Several processes wait for each other besides, which is counted with it: what a pass takes
less what the prediction adds for collectives of t seconds, which slow computing down by q:

    a + b · bytes  =  pass with sharding − pass without − t · q ÷ (1 + q)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from autopar.planner.costs.framework import read_framework_constants
from autopar.planner.costs.measurements import UnitTimes
from autopar.planner.profile.ranks import gloo, run_ranks

_UNITS = 6
_TENSORS = 8  # of a unit, about as many as a transformer block has
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 16, 2**16  # of a tensor
_REPEATS = 15
_WARM_UP = 3
_CALLS = 30  # of a collective, for one time


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
class _Added:
    """What sharding adds to a unit: to gather it in a pass, and to scatter its gradients."""

    gather_seconds: float
    scatter_seconds: float


def unit_times(ranks: int) -> UnitTimes:
    """Return the times of this host's CPU, which does all the copying itself."""
    with TemporaryDirectory(prefix="autopar-units-") as folder:
        if ranks == 1:
            _measure(0, 1, folder)
        else:
            run_ranks(_measure, (ranks, folder), ranks=ranks)
        figures = json.loads((Path(folder) / "units.json").read_text(encoding="utf-8"))
    small, large = (_Added(**one) for one in figures)
    more_bytes = 4 * _TENSORS * (_LARGE_ELEMENTS - _SMALL_ELEMENTS)
    return UnitTimes(
        gather_seconds=small.gather_seconds,
        scatter_seconds=small.scatter_seconds,
        gather_byte_seconds=max(0.0, large.gather_seconds - small.gather_seconds) / more_bytes,
        scatter_byte_seconds=max(0.0, large.scatter_seconds - small.scatter_seconds) / more_bytes,
    )


def _measure(rank: int, ranks: int, folder: str) -> None:
    """Measure both sizes on one rank; the first one writes what was found."""
    with gloo(rank, ranks, folder):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        found = [_added(elements, mesh) for elements in (_SMALL_ELEMENTS, _LARGE_ELEMENTS)]
        if rank == 0:
            text = json.dumps([asdict(one) for one in found])
            (Path(folder) / "units.json").write_text(text, encoding="utf-8")


def _added(elements: int, mesh: DeviceMesh) -> _Added:
    """Return what sharding adds to the passes of one unit; its backward gathers again."""
    plain, sharded = _passes(elements, None), _passes(elements, mesh)
    forward, backward = (max(0.0, own - bare) for own, bare in zip(sharded, plain, strict=True))
    whole = torch.ones(_TENSORS * elements)
    part = torch.ones(len(whole) // mesh.size())
    slowdown = read_framework_constants().cpu_overlap_slowdown
    told = slowdown / (1.0 + slowdown) if mesh.size() > 1 else 0.0
    gather = max(0.0, forward - told * _lone(lambda: dist.all_gather_into_tensor(whole, part)))
    scatter = told * _lone(lambda: dist.reduce_scatter_tensor(part, whole))
    return _Added(gather_seconds=gather, scatter_seconds=max(0.0, backward - forward - scatter))


def _lone(call: Callable[[], object]) -> float:
    """Return the seconds of a collective by itself."""
    blocks = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        blocks.append((time.perf_counter() - began) / _CALLS)
    return median(blocks)


def _passes(elements: int, mesh: DeviceMesh | None) -> tuple[float, float]:
    """Return the seconds of a unit's forward and backward."""
    model = nn.Sequential(*(_Unit(elements) for _ in range(_UNITS)))
    if mesh is not None:
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.zeros(elements)
    forward: list[float] = []
    backward: list[float] = []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier()
        began = time.perf_counter()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - middle)
        forward.append(middle - began)
        model.zero_grad()
    return median(forward[_WARM_UP:]) / _UNITS, median(backward[_WARM_UP:]) / _UNITS
