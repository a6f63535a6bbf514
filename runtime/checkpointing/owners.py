"""Which rank writes which part of what all of them hold.

Turns the modules of this rank into the logical tensors that it holds parts of.

A logical tensor is one of the user's whole model, under the first of its names there; which part of
it is here follows from the plan. So what one plan has written another one can read.
"""

from __future__ import annotations

import math
import pickle
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

from autopar.runtime.optimizer.pieces import FlatPiece, ParameterPiece, local_tensor, pieces_of
from autopar.runtime.ranks.mesh import Mesh
from autopar.runtime.tensor.shards import (
    Chunks,
    TensorPlace,
    boxes,
    group_aliases,
    places,
    recorded_chunks,
    whole,
    whole_names,
    with_rows,
)
from autopar.runtime.tensor.slices import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """What is here of a logical tensor, in the memory where the training has it."""

    key: str
    chunks: Chunks
    tensor: Tensor
    is_buffer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer of a module, and what is here of it."""

    names: tuple[str, ...]  # in the whole model, the first of which stands for all
    place: TensorPlace
    chunks: Chunks

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, not a buffer."""
        return isinstance(self.place.tensor, nn.Parameter)

    @property
    def is_persistent(self) -> bool:
        """Whether it belongs to a state dict."""
        return self.place.attribute not in self.place.module._non_persistent_buffers_set


def named_tensors(parts: Iterable[nn.Module]) -> Iterator[NamedTensor]:
    """Yield every parameter and buffer once."""
    for part in parts:
        for group in group_aliases(places(part)):
            first = group[0]
            held = recorded_chunks(first.module, first.attribute)
            chunks = with_rows(held or whole(tuple(first.tensor.shape)), first.tensor)
            yield NamedTensor(names=whole_names(part, group), place=first, chunks=chunks)


class Stepped:
    """What an optimizer steps: pieces of the parameters that learn, or these themselves."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        pieces = pieces_of(optimizer) if optimizer is not None else None
        self._are_pieces = pieces is not None
        self._pieces: dict[int, list[ParameterPiece]] = {}
        for piece in pieces or ():
            self._pieces.setdefault(id(piece.parameter), []).append(piece)

    def pieces(self, tensor: Tensor) -> Sequence[ParameterPiece] | None:
        """Return the pieces of a parameter that are here, or None where it has none anywhere."""
        if not (self._are_pieces and tensor.requires_grad):
            return None
        return self._pieces.get(id(tensor), ())


def weights_held(parts: Iterable[nn.Module], optimizer: Optimizer | None) -> Iterator[LocalPart]:
    """Yield what is here of the weights: where the optimizer has them in fp32, that."""
    stepped = Stepped(optimizer)
    for one in named_tensors(parts):
        tensor, key = one.place.tensor, one.names[0]
        pieces = stepped.pieces(tensor)
        if pieces is None:
            local, is_buffer = local_tensor(tensor.detach()), not one.is_parameter
            yield LocalPart(key=key, chunks=one.chunks, tensor=local, is_buffer=is_buffer)
        for piece in pieces or ():
            yield from parts_of(piece, key, one.chunks, value_of(piece))


def value_of(piece: ParameterPiece) -> Tensor:
    """Return the values that an optimizer steps, where they lie now."""
    is_copy = piece.target.dtype != piece.place.dtype
    return piece.target.detach() if is_copy else piece.place


def parts_of(
    piece: ParameterPiece, key: str, chunks: Chunks, values: Tensor
) -> Iterator[LocalPart]:
    """Yield values of a piece as boxes of the parameter, of which `chunks` are here."""
    if not isinstance(piece, FlatPiece):
        yield LocalPart(key=key, chunks=chunks, tensor=values)
        return
    first = 0
    for box in boxes(chunks.local_shape, piece.span.start, piece.span.stop):
        held = chunks.within_box(box)
        last = first + held.elements
        tensor = values.reshape(-1)[first:last].view(held.local_shape)
        yield LocalPart(key=key, chunks=held, tensor=tensor)
        first = last


Slices: TypeAlias = tuple[slice, ...]


def overlaps(one: Chunks, other: Chunks) -> Iterator[tuple[Slices, Slices]]:
    """Yield boxes of the same elements: where each lies in one shard, and where in the other."""
    by_dim = [list(_common(own, its)) for own, its in zip(one.ranges, other.ranges, strict=True)]
    for block in product(*by_dim):
        yield tuple(own for own, _ in block), tuple(its for _, its in block)


def _common(one: Ranges, other: Ranges) -> Iterator[tuple[slice, slice]]:
    """Yield what is common to ranges that are laid end to end, in the one and in the other."""
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
class _HeldShard:
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
        self._here: Sequence[_HeldShard] | None = None
        self._owned: tuple[Owned, ...] = ()

    def of(self, local_tensors: Iterable[LocalPart]) -> tuple[Owned, ...]:
        """Return what each rank writes, the same on all ranks, in the order of keys."""
        here = [
            _HeldShard(
                key=one.key, dtype=one.tensor.dtype, chunks=one.chunks, is_buffer=one.is_buffer
            )
            for one in local_tensors
        ]
        if any_rank(here != self._here, self._mesh):
            self._here, self._owned = here, shared_out(every_rank(here, self._mesh))
        return self._owned


class Here:
    """Finds what this rank writes in the memory of the training."""

    def __init__(self, local_tensors: Iterable[LocalPart]) -> None:
        self._tensors: dict[tuple[str, Chunks], Tensor] = {}
        for one in local_tensors:
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


def shared_out(ranks: Sequence[Sequence[_HeldShard]]) -> tuple[Owned, ...]:
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


def _holders(ranks: Sequence[Sequence[_HeldShard]]) -> dict[_HeldShard, list[int]]:
    """Return which ranks hold each shard; what copies of a model hold is looked at once."""
    alike: dict[int, tuple[Sequence[_HeldShard], list[int]]] = {}
    for rank, held in enumerate(ranks):
        alike.setdefault(id(held), (held, []))[1].append(rank)  # every_rank reads equal ones once
    holders: defaultdict[_HeldShard, list[int]] = defaultdict(list)
    for held, same in alike.values():
        for one in dict.fromkeys(held):  # a tied weight may be here twice, in two stages
            if one.chunks.elements > 0 or math.prod(one.chunks.global_shape) == 0:
                holders[one] += same
    return {one: sorted(found) for one, found in holders.items()}


def _parts(
    one: _HeldShard, holders: Sequence[int], load: defaultdict[int, int], piece: int
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
