"""Agrees which rank writes what of every logical tensor, so that each element is written once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.keeping.holdings import Holding
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.tensor.chunks import Chunks

SMALL = 2**14  # elements that one rank writes alone, though others hold them as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A shard of a logical tensor, and what of it one rank writes."""

    key: str
    dtype: torch.dtype
    rank: int
    held: Chunks
    rows: tuple[int, int] | None = None  # of the shard; None: all of it

    @property
    def chunks(self) -> Chunks:
        """What is written, in the whole tensor."""
        if self.rows is None:
            return self.held
        shape = self.held.local_shape
        return self.held.within_box((self.rows, *((0, size) for size in shape[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    key: str
    dtype: torch.dtype
    chunks: Chunks
    is_buffer: bool


def owners(holdings: Iterable[Holding], mesh: Mesh) -> tuple[Owned, ...]:
    """Return what each rank writes, the same on all ranks, in the order of keys."""
    here = [
        _Held(key=one.key, dtype=one.tensor.dtype, chunks=one.chunks, is_buffer=one.is_buffer)
        for one in holdings
    ]
    return shared_out(every_rank(here, mesh))


class Here:
    """Finds what this rank writes in the memory of the training."""

    def __init__(self, holdings: Iterable[Holding]) -> None:
        self._tensors: dict[tuple[str, Chunks], Tensor] = {}
        for one in holdings:
            self._tensors.setdefault((one.key, one.chunks), one.tensor)

    def tensor(self, owned: Owned) -> Tensor:
        """Return the numbers of what this rank owns."""
        tensor = self._tensors[owned.key, owned.held]
        return tensor if owned.rows is None else tensor[slice(*owned.rows)]


def every_rank(value: Any, mesh: Mesh) -> list[Any]:
    """Return what each rank has, on all of them."""
    if mesh.world.size == 1:
        return [value]
    found: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(found, value, group=mesh.world.group)
    return found


def shared_out(ranks: Sequence[Sequence[_Held]]) -> tuple[Owned, ...]:
    """Share out what several ranks hold: large shards by rows, small ones to who has least to do.

    A buffer is written by the first of its ranks: statistics need not be equal on all of them.
    """
    holders: dict[_Held, list[int]] = {}
    for rank, held in enumerate(ranks):
        for one in held:
            if one.chunks.elements == 0 and math.prod(one.chunks.global_shape) > 0:
                continue
            found = holders.setdefault(one, [])
            if rank not in found:  # a tied weight may be here twice, in two stages
                found.append(rank)
    load: defaultdict[int, int] = defaultdict(int)
    owned: list[Owned] = []
    for one in sorted(holders, key=lambda held: (held.key, held.chunks.ranges)):
        for part in _parts(one, holders[one], load):
            load[part.rank] += part.chunks.elements * part.dtype.itemsize
            owned.append(part)
    return tuple(owned)


def _parts(one: _Held, holders: Sequence[int], load: defaultdict[int, int]) -> list[Owned]:
    count, shape = len(holders), one.chunks.local_shape
    if one.is_buffer or count == 1:
        return [Owned(key=one.key, dtype=one.dtype, rank=holders[0], held=one.chunks)]
    if one.chunks.elements < SMALL or shape[0] < count:
        least = min(holders, key=lambda rank: (load[rank], rank))
        return [Owned(key=one.key, dtype=one.dtype, rank=least, held=one.chunks)]
    ends = [shape[0] * n // count for n in range(count + 1)]
    return [
        Owned(key=one.key, dtype=one.dtype, rank=rank, held=one.chunks, rows=(low, high))
        for rank, low, high in zip(holders, ends, ends[1:], strict=False)
    ]
