"""Measures collectives between processes of this machine, and fits latency and rate.

A collective of payload S takes  T = h·α + k·S ÷ β,  where its algorithm has h hops and sends k
times the payload (costs/collectives/choice.py). α and β minimise Σ ((h·α + k·S/β − T) ÷ T)², so
that small messages count as much as large ones. They are fitted to each collective, and to all
together.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from autopar.planner.cluster.cluster import Backend, Collective, MeasuredCollective
from autopar.planner.cluster.detected import MeasuredLink
from autopar.planner.costs.collectives.choice import hops, sent_share
from autopar.planner.errors import InputError
from autopar.planner.profile.measured import MeasuredNet


def run_ranks(
    function: Callable[..., None],
    arguments: tuple[object, ...],
    *,
    ranks: int,
    timeout_seconds: float = 300.0,
) -> None:
    """Call a function in `ranks` new processes at once, with the rank before the other arguments.

    If a collective hangs, this raises after the timeout.
    """
    start: Any = spawn  # torch gives it no types
    context = start(function, arguments, nprocs=ranks, join=False)
    deadline = time.monotonic() + timeout_seconds
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise InputError(
                    f"the collectives were not done after {timeout_seconds:.0f} s",
                    fix="try again on a quieter machine",
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        last_line = str(error).strip().split("\n")[-1]
        raise InputError(f"measuring the collectives failed: {last_line}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


BLOCK_SECONDS = 2e-3  # calls are repeated for about this time before the clock is read
CASE_SECONDS = 0.06  # the time for a collective at one size in one pass
_FEWEST_BLOCKS, _MOST_BLOCKS = 1, 15
# Each pass measures all cases: then another program disturbs some samples of all cases, not all
# samples of one.
_PASSES = 5


def run(rank: int, ranks: int, folder: str, backend: str, cases: list[tuple[str, int]]) -> None:
    """Measure cases (collective, payload bytes); rank 0 writes their seconds into the folder."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames functions
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
                call = _call(Collective(name), size, ranks, device)
                own += _repeated(Collective(name), call, device)
        if rank == 0:
            seconds = [typical(own) for own in samples]
            (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _repeated(collective: Collective, call: Callable[[], object], device: str) -> list[float]:
    """Return the mean seconds of a call in each of several blocks, on the slowest rank."""
    per_call = 2 if collective is Collective.POINT_TO_POINT else 1  # there and back
    _block(call, 1, device)
    first = slowest(_block(call, 2, device) / 2, device)
    calls = max(1, min(200, round(BLOCK_SECONDS / first)))
    blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, round(CASE_SECONDS / (first * calls))))
    return [slowest(_block(call, calls, device) / calls, device) / per_call for _ in range(blocks)]


def typical(seconds: list[float]) -> float:
    """Return the mean without the fastest and the slowest tenth.

    The fastest time would be too optimistic: ranks wait for each other at every collective, so each
    thread that wakes up late delays all of them.
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
    """Return the maximum over all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _call(
    collective: Collective, payload_bytes: int, ranks: int, device: str
) -> Callable[[], object]:
    """Return a call on fp32 tensors; costs/collectives/algorithms.py defines the payload.

    Tensors are filled with ones, because pages of zeros that nobody wrote share one page of memory,
    which would stay in the caches.
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
        Collective.POINT_TO_POINT: lambda: _there_and_back(whole, 0, 1),
    }
    return calls[collective]


def _there_and_back(tensor: Tensor, first: int, second: int) -> None:
    """Send a message from one rank to another and back; the others do nothing."""
    rank = dist.get_rank()
    if rank == first:
        dist.send(tensor, second)
        dist.recv(tensor, second)
    elif rank == second:
        dist.recv(tensor, first)
        dist.send(tensor, first)


_PAIR_BYTES = (64, 2**20, 2**24, 2**26)


def pair_link(first: int, second: int, device: str) -> MeasuredLink:
    """Return the link between two ranks of the process group; every rank calls this."""
    samples = []
    for size in _PAIR_BYTES:
        tensor = torch.ones(size // 4, device=device)
        call = partial(_there_and_back, tensor, first, second)
        seconds = typical(_repeated(Collective.POINT_TO_POINT, call, device))
        one = NetSample(collective=Collective.POINT_TO_POINT, payload_bytes=size, seconds=seconds)
        samples.append(one)
    return fit(samples, 2)


SIZES_BYTES = tuple(4**power for power in range(5, 14))  # 1 KiB … 64 MiB
_LEAST_ALPHA_SECONDS = 1e-7
_MOST_BYTES_PER_SECOND = 1e13


@dataclass(frozen=True, slots=True, kw_only=True)
class NetSample:
    """The seconds of a collective with this payload."""

    collective: Collective
    payload_bytes: int
    seconds: float


def measure_net(
    *,
    device_name: str,
    device: str,
    ranks: int,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    timeout_seconds: float = 300.0,
) -> MeasuredNet:
    """Measure the link between ranks, which run on "cpu" or "cuda" devices of this machine."""
    backend = Backend.NCCL if device == "cuda" else Backend.GLOO
    if ranks < 2 or (device == "cuda" and ranks > torch.cuda.device_count()):
        there = f"; {torch.cuda.device_count()} GPUs are here" if device == "cuda" else ""
        raise InputError(f"{ranks} processes cannot measure a link{there}", fix="--procs 2 or more")
    samples = sample(
        link_cases(sizes_bytes), backend=backend, ranks=ranks, timeout_seconds=timeout_seconds
    )
    return net_of(samples, device_name=device_name, backend=backend, ranks=ranks)


def link_cases(sizes_bytes: Sequence[int] = SIZES_BYTES) -> tuple[tuple[Collective, int], ...]:
    """Return the cases for a link: every collective at every size."""
    return tuple((one, size) for size in sizes_bytes for one in Collective)


def net_of(
    samples: Sequence[NetSample], *, device_name: str, backend: Backend, ranks: int
) -> MeasuredNet:
    """Return the link that is fitted to samples of every collective."""
    together = fit(samples, ranks)
    return MeasuredNet(
        device=device_name,
        backend=backend,
        ranks=ranks,
        torch=torch.__version__,
        alpha_seconds=together.alpha_seconds,
        bytes_per_second=together.bytes_per_second,
        collectives=tuple(_alone(one, samples, ranks) for one in Collective),
    )


def _alone(collective: Collective, samples: Sequence[NetSample], ranks: int) -> MeasuredCollective:
    own = [sample for sample in samples if sample.collective is collective]
    line = fit(own, ranks)
    return MeasuredCollective(
        collective=collective,
        ranks=ranks,
        alpha_seconds=line.alpha_seconds,
        bytes_per_second=line.bytes_per_second,
        points=rising([(one.payload_bytes, one.seconds) for one in own]),
    )


def rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return points whose seconds never decrease: only noise makes a larger payload faster.

    Neighbours that decrease get their geometric mean (isotonic regression of the logarithms by
    pooling adjacent violators).
    """
    pools: list[list[float]] = []
    for _, seconds in sorted(points):
        pools.append([math.log(seconds)])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [math.exp(fmean(pool)) for pool in pools for _ in pool]
    return tuple(zip((size for size, _ in sorted(points)), level, strict=True))


def sample(
    cases: Sequence[tuple[Collective, int]],
    *,
    backend: Backend,
    ranks: int,
    timeout_seconds: float = 300.0,
) -> tuple[NetSample, ...]:
    """Return the seconds of collectives with these payloads, run in new processes."""
    with tempfile.TemporaryDirectory(prefix="autopar-net-") as folder:
        plain = [(one.value, size) for one, size in cases]
        arguments = (ranks, folder, backend.value, plain)
        run_ranks(run, arguments, ranks=ranks, timeout_seconds=timeout_seconds)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    return tuple(
        NetSample(collective=one, payload_bytes=size, seconds=taken)
        for (one, size), taken in zip(cases, seconds, strict=True)
    )


def fit(samples: Sequence[NetSample], ranks: int) -> MeasuredLink:
    """Return the positive latency and rate that fit the samples best."""
    rows = [
        (
            hops(one.collective, ranks) / one.seconds,
            sent_share(one.collective, ranks) * one.payload_bytes / one.seconds,
        )
        for one in samples
    ]
    alpha, inverse = _least_squares(rows)
    return MeasuredLink(
        alpha_seconds=max(alpha, _LEAST_ALPHA_SECONDS),
        bytes_per_second=1.0 / max(inverse, 1.0 / _MOST_BYTES_PER_SECOND),
    )


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Minimise Σ (h·x + s·y − 1)² with x, y ≥ 0: if one would be negative, it is 0."""
    hh = sum(h * h for h, _ in rows)
    ss = sum(s * s for _, s in rows)
    hs = sum(h * s for h, s in rows)
    h1, s1 = sum(h for h, _ in rows), sum(s for _, s in rows)
    determinant = hh * ss - hs * hs
    if determinant > 1e-12 * hh * ss:
        x = (h1 * ss - s1 * hs) / determinant
        y = (s1 * hh - h1 * hs) / determinant
        if x >= 0 and y >= 0:
            return x, y
    return min(
        ((h1 / hh, 0.0), (0.0, s1 / ss)),
        key=lambda xy: sum((h * xy[0] + s * xy[1] - 1.0) ** 2 for h, s in rows),
    )
