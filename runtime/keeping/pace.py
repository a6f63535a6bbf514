"""Finds ranks that are slower than the others, by what each of them does alone.

In a step all ranks wait for the slowest, so their steps take equally long. What differs is measured
apart: how long a rank waits for its rows, and how long it takes for the same small product, between
two steps. A slow link is not found so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from autopar.runtime.keeping.owners import every_rank
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import gathered

SLOW = 0.1  # over the others' median; of reading: of the step
_EVERY_SECONDS = 10.0
_TRIES = 5  # the fastest counts: what disturbs it makes it longer
_SIDES = {"cuda": (2048, 20), "cpu": (192, 1)}  # of the product, and how many in a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What a rank takes alone."""

    product_seconds: float
    reading_seconds: float  # for the rows of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that is slower than the others' median."""

    rank: int
    pipeline_rank: int
    what: str
    own_seconds: float
    others_seconds: float

    def __str__(self) -> str:
        own, others = self.own_seconds * 1e3, self.others_seconds * 1e3
        where = f"rank {self.rank} (pipeline rank {self.pipeline_rank})"
        return f"{where} is slow: {self.what} takes it {own:,.3g} ms, the others {others:,.3g} ms"


class Pace:
    """Compares the ranks about every ten seconds, at a step line."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._lines = 1  # until the next comparison: not at the first, which warms up
        self._reading, self._slow_before = mesh.reading.seconds, frozenset[int]()
        self._kinds: Sequence[str] | None = None  # of the devices: unlike ones are not compared

    def slow_ranks(self, steps: int, step_seconds: float) -> Sequence[SlowRank]:
        """Return who is slow, after so many steps; all ranks ask at each line."""
        read, self._reading = self._mesh.reading.seconds - self._reading, self._mesh.reading.seconds
        self._lines -= 1
        if self._mesh.world.size == 1 or self._mesh.is_dry_run or self._lines >= 0:
            return ()
        if self._kinds is None:
            self._kinds = every_rank(_kind(self._mesh.device), self._mesh)
        lines = max(int(_EVERY_SECONDS / (steps * step_seconds)), 1)
        told = [product_seconds(self._mesh.device), read / steps, float(lines)]
        every = gathered(
            torch.tensor(told, dtype=torch.float64, device=self._mesh.device), self._mesh.world
        ).tolist()
        self._lines = int(min(one[2] for one in every))
        ranks = [Own(product_seconds=one[0], reading_seconds=one[1]) for one in every]
        each = self._mesh.data.size * self._mesh.tensor.size
        found = list(slow_among(ranks, self._kinds, step_seconds, ranks_of_stage=each))
        # A product may be disturbed once; reading is a mean of many steps.
        once, self._slow_before = self._slow_before, frozenset(one.rank for one in found)
        return [one for one in found if one.rank in once]


def slow_among(
    ranks: Sequence[Own], kinds: Sequence[str], step_seconds: float, *, ranks_of_stage: int
) -> Iterator[SlowRank]:
    """Yield what ranks are slow at, compared with the others of their kind of device."""
    for rank, own in enumerate(ranks):
        others = [one for n, one in enumerate(ranks) if n != rank and kinds[n] == kinds[rank]]
        if not others:
            continue
        product = median(one.product_seconds for one in others)
        reading = median(one.reading_seconds for one in others)
        for what, own_seconds, theirs, least in (
            ("the same product", own.product_seconds, product, product * SLOW),
            ("reading the rows of a step", own.reading_seconds, reading, step_seconds * SLOW),
        ):
            if own_seconds - theirs > least:
                yield SlowRank(
                    rank=rank,
                    pipeline_rank=rank // ranks_of_stage,
                    what=what,
                    own_seconds=own_seconds,
                    others_seconds=theirs,
                )


def product_seconds(device: torch.device) -> float:
    """Return how long this device takes for a product of two matrices, the same on all ranks."""
    side, count = _SIDES[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(side, side, dtype=kind, device=device)
    result = torch.empty_like(matrix)
    return min(_seconds(matrix, result, count) for _ in range(_TRIES))


@torch.no_grad()
def _seconds(matrix: Tensor, result: Tensor, count: int) -> float:
    if matrix.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        torch.mm(matrix, matrix, out=result)
    if matrix.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _kind(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
