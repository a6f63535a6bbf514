"""Measures how long each rank computes in one step; the rest of it are messages and waiting."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.ranks.console import say
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.metrics import Event, Metrics

_MESSAGES = ("nccl", "gloo", "c10d")  # in the names of what moves them
_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What one rank did in the step."""

    rank: int
    pipeline_rank: int
    step_seconds: float
    compute_seconds: float  # at least one kernel ran that moves no message
    memory_bytes: int | None  # the most that it has reserved so far, on a GPU


class StepProfile:
    """Runs the step of --profile-step under torch's profiler, on all ranks."""

    def __init__(self, options: argparse.Namespace, mesh: Mesh, metrics: Metrics) -> None:
        self._step: int | None = None if mesh.is_dry_run else options.profile_step
        self._mesh, self._metrics = mesh, metrics
        self._profiler: Any = None
        self._begun = 0.0

    def begin(self, step: int) -> None:
        """Watch this step if it is the one."""
        if self._step == step:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints its start and stop
            self._profiler = profile(activities=[_ACTIVITIES[self._mesh.device.type]])
            self._profiler.start()
            every_rank(None, self._mesh)  # no step begins before all of them watch
            self._begun = time.perf_counter()

    def end(self, step: int) -> None:
        """Tell of this step if it was the one."""
        if self._step != step or self._profiler is None:
            return
        is_cuda = self._mesh.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._begun
        self._profiler.stop()
        own = RankProfile(
            rank=self._mesh.rank,
            pipeline_rank=self._mesh.pipeline.rank,
            step_seconds=seconds,
            compute_seconds=covered_us(_computing(self._profiler.events())) / 1e6,
            memory_bytes=torch.cuda.max_memory_reserved() if is_cuda else None,
        )
        ranks: list[RankProfile] = every_rank(own, self._mesh)
        self._metrics.add(event=Event.PROFILED, step=step, ranks=[asdict(one) for one in ranks])
        if self._mesh.rank == 0:
            say(f"profiled step {step:,}: {_told(ranks)}")


def _computing(events: Iterable[Any]) -> Iterator[tuple[float, float]]:
    """Yield when kernels ran that move no messages; on a CPU, ops."""
    for one in events:
        is_op = one.device_type.name == "CUDA" or one.name.startswith("aten::")
        if is_op and not any(word in one.name.lower() for word in _MESSAGES):
            yield one.time_range.start, one.time_range.end


def covered_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of some spans lasts, which may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _told(ranks: Iterable[RankProfile]) -> str:
    """Return what pipeline ranks do, each by the median of its ranks."""
    stages = groupby(
        sorted(ranks, key=lambda one: one.pipeline_rank), key=lambda one: one.pipeline_rank
    )
    told = []
    for stage, found in stages:
        own = list(found)
        computing, whole = (
            median(getattr(one, name) for one in own) * 1e3
            for name in ("compute_seconds", "step_seconds")
        )
        told.append(f"pipeline rank {stage} computes {computing:,.3g} of {whole:,.3g} ms")
    return ", ".join(told)
