"""Agrees which rank writes what of every logical tensor, so that each element is written once."""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.keeping.holdings import Holding
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.tensor.chunks import Chunks

SMALL = 2**14  # elements that one rank writes alone, though others hold them as well
# Of what a rank writes, in how many pieces at least: all of them about as large, so that ranks
# have about as much to write, and no more pieces than that takes.
_PIECES = 16


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


class Owners:
    """Who writes what, agreed on once, and again where what a rank holds is not what it was.

    An optimizer makes its states when a parameter has its first gradient.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._here: Sequence[_Held] | None = None
        self._owned: tuple[Owned, ...] = ()

    def of(self, holdings: Iterable[Holding]) -> tuple[Owned, ...]:
        """Return what each rank writes, the same on all ranks, in the order of keys."""
        here = [
            _Held(key=one.key, dtype=one.tensor.dtype, chunks=one.chunks, is_buffer=one.is_buffer)
            for one in holdings
        ]
        if any_rank(here != self._here, self._mesh):
            self._here, self._owned = here, shared_out(every_rank(here, self._mesh))
        return self._owned


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
    """Return what each rank has, on all of them; what is equal is read once."""
    if mesh.world.size == 1:
        return [value]
    found: list[Any] = [None] * mesh.world.size
    dist.all_gather_object(found, pickle.dumps(value), group=mesh.world.group)
    read = {one: pickle.loads(one) for one in set(found)}
    return [read[one] for one in found]


def on_first(value: Any, mesh: Mesh) -> list[Any]:
    """Return what each rank has on the first of them, and nothing on others."""
    if mesh.world.size == 1:
        return [value]
    found: list[Any] | None = [None] * mesh.world.size if mesh.rank == 0 else None
    dist.gather_object(value, found, dst=0, group=mesh.world.group)
    return found or []


def any_rank(is_so: bool, mesh: Mesh) -> bool:
    """Whether something is so on any rank."""
    if mesh.world.size == 1:
        return is_so
    found = torch.tensor(float(is_so), device=mesh.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.world.group)
    return bool(found.item())


def shared_out(ranks: Sequence[Sequence[_Held]]) -> tuple[Owned, ...]:
    """Share out what several ranks hold: large shards by rows, small ones to who has least to do.

    A buffer is written by the first of its ranks: statistics need not be equal on all of them.
    """
    holders = _holders(ranks)
    elements = sum(one.chunks.elements for one in holders)
    piece = max(1, elements // (_PIECES * len(ranks)))
    load: defaultdict[int, int] = defaultdict(int)
    owned: list[Owned] = []
    for one in sorted(holders, key=lambda held: (held.key, held.chunks.ranges)):
        for part in _parts(one, holders[one], load, piece):
            load[part.rank] += part.chunks.elements * part.dtype.itemsize
            owned.append(part)
    return tuple(owned)


def _holders(ranks: Sequence[Sequence[_Held]]) -> dict[_Held, list[int]]:
    """Return which ranks hold each shard; what copies of a model hold is looked at once."""
    alike: dict[int, tuple[Sequence[_Held], list[int]]] = {}
    for rank, held in enumerate(ranks):
        alike.setdefault(id(held), (held, []))[1].append(rank)  # every_rank reads equal ones once
    holders: defaultdict[_Held, list[int]] = defaultdict(list)
    for held, same in alike.values():
        for one in dict.fromkeys(held):  # a tied weight may be here twice, in two stages
            if one.chunks.elements > 0 or math.prod(one.chunks.global_shape) == 0:
                holders[one] += same
    return {one: sorted(found) for one, found in holders.items()}


def _parts(
    one: _Held, holders: Sequence[int], load: defaultdict[int, int], piece: int
) -> list[Owned]:
    """Cut a shard into rows for some of its holders, as few as make pieces of so many elements."""
    shape = one.chunks.local_shape
    if one.is_buffer or len(holders) == 1:
        return [Owned(key=one.key, dtype=one.dtype, rank=holders[0], held=one.chunks)]
    count = min(len(holders), -(-one.chunks.elements // piece))
    if one.chunks.elements < SMALL or shape[0] < count:
        count = 1
    least = sorted(nsmallest(count, holders, key=lambda rank: (load[rank], rank)))
    if count == 1:
        return [Owned(key=one.key, dtype=one.dtype, rank=least[0], held=one.chunks)]
    ends = [shape[0] * n // count for n in range(count + 1)]
    return [
        Owned(key=one.key, dtype=one.dtype, rank=rank, held=one.chunks, rows=(low, high))
        for rank, low, high in zip(least, ends, ends[1:], strict=False)
    ]
