"""What one rank of a measurement of collectives does: run each at each size, many times over."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.planner.cluster.link import Collective

BLOCK_SECONDS = 2e-3  # calls follow each other for so long at least, then the clock is read
CASE_SECONDS = 0.06  # of one collective at one size in one pass
_FEWEST_BLOCKS, _MOST_BLOCKS = 1, 15
# All cases take turns, so that whatever else runs for a while disturbs a part of each.
_PASSES = 5


def run(rank: int, ranks: int, folder: str, backend: str, cases: list[tuple[str, int]]) -> None:
    """Measure cases (collective, payload bytes); rank 0 writes their seconds into the folder."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch 2.13 gave anew
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    try:
        samples: list[list[float]] = [[] for _ in cases]
        for _ in range(_PASSES):
            for own, (name, size) in zip(samples, cases, strict=True):
                own += _sampled(Collective(name), size, ranks, device)
        if rank == 0:
            seconds = [typical(own) for own in samples]
            (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _sampled(collective: Collective, payload_bytes: int, ranks: int, device: str) -> list[float]:
    """Return the seconds of one call in each of some blocks, as long as the slowest rank takes."""
    call = _call(collective, payload_bytes, ranks, device)
    per_call = 2 if collective is Collective.POINT_TO_POINT else 1  # there and back
    _block(call, 1, device)
    first = slowest(_block(call, 2, device) / 2, device)
    calls = max(1, min(200, round(BLOCK_SECONDS / first)))
    blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, round(CASE_SECONDS / (first * calls))))
    return [slowest(_block(call, calls, device) / calls, device) / per_call for _ in range(blocks)]


def typical(seconds: list[float]) -> float:
    """Return the mean without the quickest and the slowest tenth.

    The quickest would flatter: ranks of a training wait for each other at every collective, and
    with it for whatever delays the wake-up of a thread now and then.
    """
    left_out = len(seconds) // 10
    return fmean(sorted(seconds)[left_out : len(seconds) - left_out])


def _block(call: Callable[[], object], calls: int, device: str) -> float:
    dist.barrier()
    _wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return time.perf_counter() - began


def slowest(seconds: float, device: str) -> float:
    """Return the most seconds of a rank, on all of them."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _call(
    collective: Collective, payload_bytes: int, ranks: int, device: str
) -> Callable[[], object]:
    """Return one call on fp32 tensors; collectives.py says which size the payload is.

    They hold ones: pages of zeros that were never written share one page, which caches hold.
    """
    elements = max(ranks, payload_bytes // 4 // ranks * ranks)
    whole = torch.ones(elements, device=device)
    other = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole),
        Collective.ALL_GATHER: lambda: dist.all_gather_into_tensor(whole, part),
        Collective.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(part, whole),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole),
        Collective.BROADCAST: lambda: dist.broadcast(whole, 0),
        Collective.POINT_TO_POINT: lambda: _there_and_back(whole),
    }
    return calls[collective]


def _there_and_back(tensor: Tensor) -> None:
    """Send a message from the first rank to the second and back; the others do nothing."""
    rank = dist.get_rank()
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
