"""Finds this rank's part of each logical tensor, and decides which rank writes which part.

A logical tensor is a tensor of the user's whole model, under the first of its names there. The plan
determines which part of it is on this rank. Checkpoints store logical tensors, so every plan can
read the checkpoints of another plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.runtime.data_parallel.buckets import Span
from autopar.runtime.optimizer.pieces import (
    FlatPiece,
    ParameterPiece,
    local_tensor,
    pieces_of,
    value_of,
)
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.ranks.transport import every_rank
from autopar.runtime.tensor.shards import (
    Chunks,
    TensorPlace,
    boxes,
    chunks_of,
    group_aliases,
    places,
    whole_names,
)
from autopar.runtime.tensor.slices import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """The part of a logical tensor on this rank, in the memory of the training."""

    key: str
    chunks: Chunks
    tensor: Tensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer of a module, and the part of it on this rank."""

    names: tuple[str, ...]  # in the whole model; the first one identifies the tensor
    place: TensorPlace
    chunks: Chunks

    @property
    def is_parameter(self) -> bool:
        """Whether the tensor is a parameter, not a buffer."""
        return isinstance(self.place.tensor, nn.Parameter)

    @property
    def is_persistent(self) -> bool:
        """Whether the tensor belongs to a state dict."""
        return self.place.attribute not in self.place.module._non_persistent_buffers_set


def named_tensors(parts: Iterable[nn.Module]) -> Iterator[NamedTensor]:
    """Yield every parameter and buffer once."""
    for part in parts:
        for group in group_aliases(places(part)):
            names = whole_names(part, group)
            yield NamedTensor(names=names, place=group[0], chunks=chunks_of(group[0]))


def stepped_tensors(
    parts: Iterable[nn.Module], optimizer: Optimizer | None
) -> Iterator[tuple[NamedTensor, Sequence[ParameterPiece] | None]]:
    """Yield every parameter and buffer with the pieces that the optimizer steps on this rank.

    In place of pieces, None is yielded for a tensor that the optimizer does not step in pieces.
    """
    pieces = pieces_of(optimizer) if optimizer is not None else None
    by_parameter: dict[int, list[ParameterPiece]] = {}
    for piece in pieces or ():
        by_parameter.setdefault(id(piece.parameter), []).append(piece)
    for one in named_tensors(parts):
        are_pieces = pieces is not None and one.place.tensor.requires_grad
        yield one, by_parameter.get(id(one.place.tensor), ()) if are_pieces else None


def local_weights(parts: Iterable[nn.Module], optimizer: Optimizer | None) -> Iterator[LocalPart]:
    """Yield the weights on this rank; if the optimizer has an fp32 copy, yield the copy."""
    for one, pieces in stepped_tensors(parts, optimizer):
        tensor, key = one.place.tensor, one.names[0]
        if pieces is None:
            local, is_buffer = local_tensor(tensor.detach()), not one.is_parameter
            yield LocalPart(key=key, chunks=one.chunks, tensor=local, is_buffer=is_buffer)
        for piece in pieces or ():
            yield from parts_of(piece, key, one.chunks, value_of(piece))


def parts_of(
    piece: ParameterPiece, key: str, chunks: Chunks, values: Tensor
) -> Iterator[LocalPart]:
    """Yield the values of a piece as boxes of the parameter's local `chunks`."""
    if isinstance(piece, FlatPiece):
        yield from parts_of_span(piece.span, key, chunks, values)
    else:
        yield LocalPart(key=key, chunks=chunks, tensor=values)


def parts_of_span(span: Span, key: str, chunks: Chunks, values: Tensor) -> Iterator[LocalPart]:
    """Yield the values of a parameter's span as boxes of its local `chunks`."""
    first = 0
    for box in boxes(chunks.local_shape, span.start, span.stop):
        inside = chunks.within_box(box)
        last = first + inside.elements
        tensor = values.reshape(-1)[first:last].view(inside.local_shape)
        yield LocalPart(key=key, chunks=inside, tensor=tensor)
        first = last


Slices: TypeAlias = tuple[slice, ...]


def overlaps(one: Sequence[Ranges], other: Sequence[Ranges]) -> Iterator[tuple[Slices, Slices]]:
    """Yield the boxes that two shards share, as slices of the first and of the second."""
    by_dim = [list(_common(own, its)) for own, its in zip(one, other, strict=True)]
    for block in product(*by_dim):
        yield tuple(own for own, _ in block), tuple(its for _, its in block)


def _common(one: Ranges, other: Ranges) -> Iterator[tuple[slice, slice]]:
    """Yield the overlaps of two shards in one dim, as slices of the first and of the second."""
    offset = 0
    for low, high in one:
        its = 0
        for first, last in other:
            start, stop = max(low, first), min(high, last)
            if start < stop:
                yield (
                    slice(offset + start - low, offset + stop - low),
                    slice(its + start - first, its + stop - first),
                )
            its += last - first
        offset += high - low


SMALL = 2**14  # elements; a smaller shard is written whole by one rank
# About how many pieces each rank writes: enough that all ranks write nearly equal amounts.
_PIECES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A shard of a logical tensor, and the part of it that one rank writes."""

    key: str
    dtype: torch.dtype
    rank: int
    shard: Chunks
    rows: tuple[int, int] | None = None  # of the shard; None: all of them

    @property
    def chunks(self) -> Chunks:
        """Return the written part as chunks of the whole tensor."""
        if self.rows is None:
            return self.shard
        shape = self.shard.local_shape
        return self.shard.within_box((self.rows, *((0, size) for size in shape[1:])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankShard:
    key: str
    dtype: torch.dtype
    chunks: Chunks
    is_buffer: bool


class Owners:
    """The agreement on which rank writes which shard, renewed when a rank holds other tensors.

    The tensors of a rank change, because an optimizer creates a parameter's states at the first
    gradient.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._here: Sequence[_RankShard] | None = None
        self._owned: tuple[Owned, ...] = ()

    def of(self, local_tensors: Iterable[LocalPart]) -> tuple[Owned, ...]:
        """Return the shards that ranks write: the same list on all ranks, ordered by key."""
        here = [
            _RankShard(
                key=one.key, dtype=one.tensor.dtype, chunks=one.chunks, is_buffer=one.is_buffer
            )
            for one in local_tensors
        ]
        if any_rank(here != self._here, self.mesh):
            self._here, self._owned = here, shared_out(every_rank(here, self.mesh.world))
        return self._owned


class LocalTensors:
    """Finds, in the memory of the training, the tensors that this rank writes."""

    def __init__(self, local_tensors: Iterable[LocalPart]) -> None:
        self._tensors: dict[tuple[str, Chunks], Tensor] = {}
        for one in local_tensors:
            self._tensors.setdefault((one.key, one.chunks), one.tensor)

    def tensor(self, owned: Owned) -> Tensor:
        """Return the values of a shard that this rank writes."""
        tensor = self._tensors[owned.key, owned.shard]
        return tensor if owned.rows is None else tensor[slice(*owned.rows)]


def on_first(value: Any, mesh: Mesh) -> list[Any]:
    """Return every rank's value on the first rank, and an empty list on others."""
    if mesh.world.size == 1:
        return [value]
    found: list[Any] | None = [None] * mesh.world.size if mesh.rank == 0 else None
    dist.gather_object(value, found, dst=0, group=mesh.world.group)
    return found or []


def any_rank(is_so: bool, mesh: Mesh) -> bool:
    """Whether a condition holds on any rank."""
    if mesh.world.size == 1:
        return is_so
    found = torch.tensor(float(is_so), device=mesh.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.world.group)
    return bool(found.item())


def shared_out(ranks: Sequence[Sequence[_RankShard]]) -> tuple[Owned, ...]:
    """Return which rank writes which shard, from the shards that each rank holds.

    If several ranks hold a shard, a large one is split by rows, and a small one goes to the rank
    with the least to write. A buffer is written by the first rank that holds it: running statistics
    differ between ranks.
    """
    holders = _holders(ranks)
    elements = sum(one.chunks.elements for one in holders)
    piece = max(1, elements // (_PIECES * len(ranks)))
    load: defaultdict[int, int] = defaultdict(int)
    owned: list[Owned] = []
    for one in sorted(holders, key=lambda shard: (shard.key, shard.chunks.ranges)):
        for part in _parts(one, holders[one], load, piece):
            load[part.rank] += part.chunks.elements * part.dtype.itemsize
            owned.append(part)
    return tuple(owned)


def _holders(ranks: Sequence[Sequence[_RankShard]]) -> dict[_RankShard, list[int]]:
    """Return the ranks that hold each shard. Ranks with equal lists of shards are handled once."""
    alike: dict[int, tuple[Sequence[_RankShard], list[int]]] = {}
    for rank, shards in enumerate(ranks):
        alike.setdefault(id(shards), (shards, []))[1].append(rank)  # equal lists are one object
    holders: defaultdict[_RankShard, list[int]] = defaultdict(list)
    for shards, same in alike.values():
        for one in dict.fromkeys(shards):  # a tied weight may be on this rank twice, in two stages
            if one.chunks.elements > 0 or math.prod(one.chunks.global_shape) == 0:
                holders[one] += same
    return {one: sorted(found) for one, found in holders.items()}


def _parts(
    one: _RankShard, holders: Sequence[int], load: defaultdict[int, int], piece: int
) -> list[Owned]:
    """Split a shard by rows among its holders, in parts of at least about `piece` elements."""
    shape = one.chunks.local_shape
    if one.is_buffer or len(holders) == 1:
        return [Owned(key=one.key, dtype=one.dtype, rank=holders[0], shard=one.chunks)]
    count = min(len(holders), -(-one.chunks.elements // piece))
    if one.chunks.elements < SMALL or shape[0] < count:
        count = 1
    least = sorted(nsmallest(count, holders, key=lambda rank: (load[rank], rank)))
    if count == 1:
        return [Owned(key=one.key, dtype=one.dtype, rank=least[0], shard=one.chunks)]
    ends = [shape[0] * n // count for n in range(count + 1)]
    return [
        Owned(key=one.key, dtype=one.dtype, rank=rank, shard=one.chunks, rows=(low, high))
        for rank, low, high in zip(least, ends, ends[1:], strict=False)
    ]
