"""Measures the collectives among processes of this machine and fits latency and rate to them.

A collective of payload S takes  T = h·α + k·S ÷ β,  where its algorithm pays h latencies and sends
k of the payload (collectives/choice.py). α and β minimise Σ ((h·α + k·S/β − T) ÷ T)², so that
small messages count as much as large ones; once for each collective, and once for all together.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from autopar.planner.cluster.link import Backend, Collective, MeasuredCollective
from autopar.planner.costs.collectives.measured import hops, sent_share
from autopar.planner.errors import InputError
from autopar.planner.profile.measured import MeasuredNet
from autopar.planner.profile.net_rank import run
from autopar.planner.profile.ranks import run_ranks

SIZES_BYTES = tuple(4**power for power in range(5, 14))  # 1 KiB … 64 MiB
_LEAST_ALPHA_SECONDS = 1e-7
_MOST_BYTES_PER_SECOND = 1e13


@dataclass(frozen=True, slots=True, kw_only=True)
class NetSample:
    """The seconds of one collective of this payload."""

    collective: Collective
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Latency and rate of a link; `worst` is the largest relative residual."""

    alpha_seconds: float
    bytes_per_second: float
    worst: float


def measure_net(
    *,
    device_name: str,
    device: str,
    ranks: int,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    timeout_seconds: float = 300.0,
) -> MeasuredNet:
    """Return the link among ranks on "cpu" or "cuda" devices."""
    backend = Backend.NCCL if device == "cuda" else Backend.GLOO
    if ranks < 2 or (device == "cuda" and ranks > torch.cuda.device_count()):
        there = f"; {torch.cuda.device_count()} GPUs are here" if device == "cuda" else ""
        raise InputError(f"{ranks} processes cannot measure a link{there}", fix="--procs 2 or more")
    samples = sample(
        link_cases(sizes_bytes), backend=backend, ranks=ranks, timeout_seconds=timeout_seconds
    )
    return net_of(samples, device_name=device_name, backend=backend, ranks=ranks)


def link_cases(sizes_bytes: Sequence[int] = SIZES_BYTES) -> tuple[tuple[Collective, int], ...]:
    """Return what a link is measured by: every collective at every size."""
    return tuple((one, size) for size in sizes_bytes for one in Collective)


def net_of(
    samples: Sequence[NetSample], *, device_name: str, backend: Backend, ranks: int
) -> MeasuredNet:
    """Return the link that samples of every collective show."""
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
    """Return points whose seconds never fall: a larger payload is never quicker, but noise is.

    Neighbours that fall are replaced by their geometric mean (isotonic regression of the
    logarithms by pooling adjacent violators).
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
    """Run collectives of these payloads on new processes of this machine."""
    with tempfile.TemporaryDirectory(prefix="autopar-net-") as folder:
        plain = [(one.value, size) for one, size in cases]
        arguments = (ranks, folder, backend.value, plain)
        run_ranks(run, arguments, ranks=ranks, timeout_seconds=timeout_seconds)
        seconds = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
    return tuple(
        NetSample(collective=one, payload_bytes=size, seconds=taken)
        for (one, size), taken in zip(cases, seconds, strict=True)
    )


def fit(samples: Sequence[NetSample], ranks: int) -> Fit:
    """Return the latency and the rate that agree best with samples, both above zero."""
    rows = [
        (
            hops(one.collective, ranks) / one.seconds,
            sent_share(one.collective, ranks) * one.payload_bytes / one.seconds,
        )
        for one in samples
    ]
    alpha, inverse = _least_squares(rows)
    residuals = (abs(h * alpha + s * inverse - 1.0) for h, s in rows)
    return Fit(
        alpha_seconds=max(alpha, _LEAST_ALPHA_SECONDS),
        bytes_per_second=1.0 / max(inverse, 1.0 / _MOST_BYTES_PER_SECOND),
        worst=max(residuals, default=0.0),
    )


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Minimise Σ (h·x + s·y − 1)² with x, y ≥ 0: where one would be negative, the other alone."""
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
