"""What one rank of a measurement does for collectives that a training on CPUs waits for.

Called one after another they tell little: two processes that swap 100 KB take 0.15 ms, but 0.8 ms
where each computed for a millisecond before, since then threads have to be woken on cores that the
other one's computation holds. So every call follows a computation, whose time is subtracted. Of
one that takes 0.25, 1 and 4 ms, a swap takes 0.5, 0.8 and 1.2 ms there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from autopar.planner.costs.collective_measured import Collective
from autopar.planner.profile.computing import computation
from autopar.planner.profile.net_rank import slowest, typical
from autopar.planner.profile.ranks import gloo

# Makes what calls a collective of a payload as scripts do: of rank r of n.
TrainingCalls: TypeAlias = Callable[[Collective, int, int, int], Callable[[], object]]

WAITED = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
)
_COMPUTING_SECONDS = 1e-3  # before each call
_CALLS = 12  # of a block
_PASSES, _BLOCKS = 5, 3  # all cases take turns
_LEAST_SECONDS = 1e-6


def run_waits(
    rank: int, ranks: int, folder: str, calls: TrainingCalls, cases: Sequence[tuple[str, int]]
) -> None:
    """Measure cases (collective, payload bytes); rank 0 writes their seconds into the folder."""
    with gloo(rank, ranks, folder):
        compute = computation(_COMPUTING_SECONDS)
        made = [calls(Collective(name), size, rank, ranks) for name, size in cases]
        samples: list[list[float]] = [[] for _ in cases]
        for _ in range(_PASSES):
            for own, call in zip(samples, made, strict=True):
                own += [_waited(compute, call) for _ in range(_BLOCKS)]
        if rank == 0:
            seconds = [max(_LEAST_SECONDS, typical(own)) for own in samples]
            (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
        dist.barrier()


def _waited(compute: Callable[[], None], call: Callable[[], object]) -> float:
    """Return how much longer the slowest rank takes for a turn with the call than without."""
    with_call = slowest(_block_seconds(compute, call), "cpu")
    return with_call - slowest(_block_seconds(compute, _nothing), "cpu")


def _block_seconds(first: Callable[[], object], then: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(_CALLS):
        first()
        then()
    return (time.perf_counter() - began) / _CALLS


def _nothing() -> None:
    pass
