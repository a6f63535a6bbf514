"""What one rank of a measurement does for collectives that scripts make of others, on CPUs.

Called one after another they tell little: two processes that swap 100 KB take 0.15 ms, but 0.8 ms
where each computed for a millisecond before, since then threads have to be woken on cores that the
other one's computation holds. So every call follows a computation, whose time is subtracted. Of
one that takes 0.25, 1 and 4 ms, a swap takes 0.5, 0.8 and 1.2 ms there.

Buckets of gradients and parameters move otherwise than gloo's own collectives move them: 5.6 MB are
scattered to two ranks and gathered again in 3.4 and 3.1 ms after 10 ms of computing, by gloo's own
in 7.2 and 4.5 ms; after one millisecond in 2.2 and 2.2 ms, and 5.8 and 3.3.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch.distributed as dist

from autopar.planner.cluster.link import Collective, Manner
from autopar.planner.profile.computing import computation
from autopar.planner.profile.net_rank import slowest, typical
from autopar.planner.profile.ranks import gloo

# Makes what calls a collective of a payload in a manner as scripts do: of rank r of n.
TrainingCalls: TypeAlias = Callable[[Manner, Collective, int, int, int], Callable[[], object]]

_SUMS_AND_PARTS = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
OF_SCRIPTS: Mapping[Manner, Sequence[Collective]] = {
    Manner.WAITED: (*_SUMS_AND_PARTS, Collective.ALL_TO_ALL),
    Manner.BUCKET: _SUMS_AND_PARTS,
}
_COMPUTING_SECONDS = 1e-3  # before each call
_FEWEST_CALLS, _MOST_CALLS = 2, 12  # of a block
_BLOCK_SECONDS = 30e-3
_PASSES, _BLOCKS = 5, 3  # all cases take turns
_LEAST_SECONDS = 1e-6


def run_waits(
    rank: int,
    ranks: int,
    folder: str,
    calls: TrainingCalls,
    manner: Manner,
    cases: Sequence[tuple[str, int]],
) -> None:
    """Measure cases (collective, payload bytes); rank 0 writes their seconds into the folder."""
    with gloo(rank, ranks, folder):
        compute = computation(_COMPUTING_SECONDS)
        made = [calls(manner, Collective(name), size, rank, ranks) for name, size in cases]
        counts = [_calls_of_a_block(compute, call) for call in made]
        samples: list[list[float]] = [[] for _ in cases]
        for _ in range(_PASSES):
            for own, call, count in zip(samples, made, counts, strict=True):
                own += [_waited(compute, call, count) for _ in range(_BLOCKS)]
        if rank == 0:
            seconds = [max(_LEAST_SECONDS, typical(own)) for own in samples]
            (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
        dist.barrier()


def _calls_of_a_block(compute: Callable[[], None], call: Callable[[], object]) -> int:
    """Return how many calls a block has, as many on every rank; the first ones are made here."""
    turn = slowest(_turn_seconds(compute, call, _FEWEST_CALLS), "cpu")
    return max(_FEWEST_CALLS, min(_MOST_CALLS, round(_BLOCK_SECONDS / turn)))


def _waited(compute: Callable[[], None], call: Callable[[], object], count: int) -> float:
    """Return how much longer the slowest rank takes for a turn with the call than without."""
    with_call = slowest(_turn_seconds(compute, call, count), "cpu")
    return with_call - slowest(_turn_seconds(compute, _nothing, count), "cpu")


def _turn_seconds(compute: Callable[[], None], call: Callable[[], object], count: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        compute()
        call()
    return (time.perf_counter() - began) / count


def _nothing() -> None:
    pass
