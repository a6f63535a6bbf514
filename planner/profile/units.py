"""Measures what fully_shard takes its host for a unit, beside the collectives.

A unit takes  a + b · bytes  to gather (its hooks, the copy to where parameters are used) and
likewise to scatter (hooks, the copy of gradients to where they are sent): units of two sizes tell
a and b. They compute meanwhile, as in a training: threads that send have to be woken on cores that
compute, and what ranks wait for that is counted with it. So it is what passes take with sharding,
less what is predicted for passes that take what they do without, and for the lone collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from autopar.planner.costs.ops.measurements import UnitTimes
from autopar.planner.costs.steps.framework import read_framework_constants
from autopar.planner.costs.steps.overlap import LayerLoad, sharded_backward, sharded_forward
from autopar.planner.profile.computing import computation
from autopar.planner.profile.ranks import gloo, run_ranks

_UNITS = 6
_TENSORS = 8  # of a unit, about as many as a transformer block has
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 16, 2**16  # of a tensor
_COMPUTING_SECONDS = 1e-3  # of a unit's forward; its backward takes twice as long
_REPEATS = 15
_WARM_UP = 3
_CALLS = 30  # of a collective, for one time


class _Unit(nn.Module):
    """Adds its parameters to what comes in, and computes: once in its forward, twice back."""

    def __init__(self, elements: int, compute: Callable[[], None]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(elements) for _ in range(_TENSORS))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        self.compute()
        for weight in self.weights:
            x = x + weight
        x.register_hook(self.compute_back)  # type: ignore[no-untyped-call]
        return x

    def compute_back(self, _: Tensor) -> None:
        """Compute as long as for two gradients."""
        self.compute()
        self.compute()


Samples: TypeAlias = list[tuple[float, float]]  # seconds of forwards and backwards


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
        compute = computation(_COMPUTING_SECONDS) if ranks > 1 else _nothing
        sizes = (_SMALL_ELEMENTS, _LARGE_ELEMENTS)
        cases = [(elements, one) for elements in sizes for one in (None, mesh)]
        samples = _in_turns([_model(*case, compute) for case in cases])
        found = [
            _added(samples[2 * i], samples[2 * i + 1], elements, ranks)
            for i, elements in enumerate(sizes)
        ]
        if rank == 0:
            text = json.dumps([asdict(one) for one in found])
            (Path(folder) / "units.json").write_text(text, encoding="utf-8")


def _nothing() -> None:
    pass


def _added(plain: Samples, sharded: Samples, elements: int, ranks: int) -> _Added:
    """Return what sharding adds to the passes of one unit; its backward gathers again."""
    bare = _unit_medians(plain)
    told = _told(bare, elements, ranks) if ranks > 1 else (0.0, 0.0)
    more = [
        (own[0] - other[0], own[1] - other[1]) for own, other in zip(sharded, plain, strict=True)
    ]
    forward, backward = (
        max(0.0, added - known) for added, known in zip(_unit_medians(more), told, strict=True)
    )
    return _Added(gather_seconds=forward, scatter_seconds=max(0.0, backward - forward))


def _unit_medians(samples: Samples) -> tuple[float, float]:
    forward, backward = zip(*samples, strict=True)
    return median(forward) / _UNITS, median(backward) / _UNITS


def _told(plain: tuple[float, float], elements: int, ranks: int) -> tuple[float, float]:
    """Return what is predicted for the collectives around the passes of one of the units."""
    whole = torch.ones(_TENSORS * elements)
    part = torch.ones(len(whole) // ranks)
    gather = _lone(lambda: dist.all_gather_into_tensor(whole, part))
    scatter = _lone(lambda: dist.reduce_scatter_tensor(part, whole))
    slowdown = read_framework_constants().cpu_overlap_slowdown
    unit = LayerLoad(
        forward_seconds=plain[0], backward_seconds=plain[1], parameter_bytes=1, gradient_bytes=1
    )
    units = (unit,) * _UNITS
    forward = sharded_forward(units, lambda _: gather, slowdown=slowdown)
    backward = sharded_backward(units, lambda _: gather, lambda _: scatter, slowdown=slowdown)
    return (
        forward.total_seconds / _UNITS - plain[0],
        backward.total_seconds / _UNITS - plain[1],
    )


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


def _model(elements: int, mesh: DeviceMesh | None, compute: Callable[[], None]) -> nn.Module:
    model = nn.Sequential(*(_Unit(elements, compute) for _ in range(_UNITS)))
    if mesh is not None:
        for unit in model:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _in_turns(models: Sequence[nn.Module]) -> list[Samples]:
    """Return the seconds of the passes of models; whatever disturbs a while disturbs all."""
    found: list[Samples] = [[] for _ in models]
    for number in range(_WARM_UP + _REPEATS):
        for own, model in zip(found, models, strict=True):
            passes = _pass_seconds(model)
            if number >= _WARM_UP:
                own.append(passes)
    return found


def _pass_seconds(model: nn.Module) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward."""
    dist.barrier()
    began = time.perf_counter()
    loss = model(torch.zeros(1)).sum()
    middle = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    model.zero_grad()
    return middle - began, ended - middle
