"""Cuts tensors over ranks: computes ranges, remembers lengths, takes and joins slices.

`parts` describes a dim as parts laid end to end, each of `count` blocks of `unit` elements. Every
part is cut over the ranks by whole blocks; if their number does not divide evenly, the first ranks
get one block more. A fused q-k-v weight of 12 heads of 64 is ((12, 64), (12, 64), (12, 64)): the
shard of a concatenation is the concatenation of the shards.

Also remembers the whole lengths of a microbatch's split dims. 57 tokens on two ranks are 29 and 28,
and from 29 a rank cannot tell whether all ranks have 57 or 58. A length is known if the dim was cut
in this forward, or if the stage received it. If two known lengths (of a text and of its labels,
say) have equal shares on some rank, the ranks exchange a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import (
    exchanged,
    exchanged_pieces,
    gathered,
    joined_along_first,
    sum_scattered,
)

Parts = tuple[tuple[int, int], ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements of one dim that every rank holds."""

    ranges: tuple[Ranges, ...]  # per rank, [start, stop) of the whole dim
    sizes: tuple[int, ...]  # number of elements, per rank
    is_even: bool  # one range per rank, all of the same size

    @property
    def whole(self) -> int:
        """The size of the dim before it was cut."""
        return sum(self.sizes)


def cut(parts: Parts, size: int) -> Cut:
    """Cut a dim over the ranks of an axis."""
    # torch.compile warns of caches
    return (_new_cut if torch.compiler.is_compiling() else _known_cut)(parts, size)


def _new_cut(parts: Parts, size: int) -> Cut:
    ranges = tuple(part_ranges(parts, rank, size) for rank in range(size))
    sizes = tuple(sum(stop - start for start, stop in held) for held in ranges)
    is_even = len(parts) == 1 and parts[0][0] % size == 0
    return Cut(ranges, sizes, is_even)


_known_cut = lru_cache(maxsize=1024)(_new_cut)


def part_ranges(parts: Parts, rank: int, size: int) -> Ranges:
    """Return the non-empty ranges of the whole dim that one rank holds, in order."""
    ranges, start = [], 0
    for count, unit in parts:
        first, last = _blocks_before(count, rank, size), _blocks_before(count, rank + 1, size)
        if last > first:
            ranges.append((start + first * unit, start + last * unit))
        start += count * unit
    return tuple(ranges)


def _blocks_before(count: int, rank: int, size: int) -> int:
    """Return the number of blocks before those of this rank."""
    return rank * (count // size) + min(rank, count % size)


RECEIVED = "received_lengths"  # a stage module's attribute with the lengths of received dims


@dataclass(slots=True)
class _Running:
    """The whole lengths known in the current forward; torch.compile reads no context variables."""

    known: dict[int, None] | None = None  # a set in order; None until a `begin_anew` model runs


_RUNNING = _Running()


def begin_anew(model: nn.Module) -> None:
    """Make each forward of a model forget the lengths of earlier microbatches."""
    model.register_forward_pre_hook(_forget)


def begins_anew(model: nn.Module) -> bool:
    """Whether each forward of a model forgets the lengths of earlier microbatches."""
    return _forget in model._forward_pre_hooks.values()


def _forget(module: nn.Module, _: object) -> None:
    _RUNNING.known = dict.fromkeys(module.__dict__.get(RECEIVED, ()))


def note_length(whole: int) -> None:
    """Record the whole length of a dim that this forward cuts."""
    if _RUNNING.known is not None:
        _RUNNING.known[whole] = None


def cut_of_share(local: int, axis: Axis, device: torch.device) -> Cut:
    """Return the cut of a dim of which this rank holds `local` elements."""
    known = tuple(_RUNNING.known or ())
    own = [whole for whole in known if _cut(whole, axis.size).sizes[axis.rank] == local]
    if not own:
        return _cut(local * axis.size, axis.size)
    clashes = any(_clash(own[0], other, axis.size) for other in known if other != own[0])
    if not clashes or detect_fake_mode() is not None:
        return _cut(own[0], axis.size)
    shares = gathered(torch.tensor([local], device=device), axis)
    return _cut(int(shares.sum()), axis.size)


def remembered() -> Callable[[], Any]:
    """Return a function that makes a context in which a recomputed layer knows these lengths."""
    known = None if _RUNNING.known is None else dict(_RUNNING.known)

    @contextmanager
    def again() -> Iterator[None]:
        now, _RUNNING.known = _RUNNING.known, known
        try:
            yield
        finally:
            _RUNNING.known = now

    return again


def receives(module: nn.Module, wholes: Iterable[int]) -> None:
    """Record the whole lengths of the dims whose shares a stage receives."""
    module.__dict__[RECEIVED] = tuple(wholes)


def _clash(one: int, other: int, size: int) -> bool:
    """Whether two lengths have equal shares on some rank."""
    pairs = zip(_cut(one, size).sizes, _cut(other, size).sizes, strict=True)
    return any(first == second for first, second in pairs)


def _cut(whole: int, size: int) -> Cut:
    return cut(((whole, 1),), size)


def pick(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Concatenate the ranges of a dim in a new contiguous tensor."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


def slice_along(x: Tensor, dim: int, shares: Cut, axis: Axis) -> Tensor:
    """Keep this rank's slice of a whole dim."""
    return pick(x, dim, shares.ranges[axis.rank])


def pad_along(x: Tensor, dim: int, shares: Cut, axis: Axis) -> Tensor:
    """Put this rank's slice in its place among zeros."""
    whole = x.new_zeros(_resized(x, dim, shares.whole))
    offset = 0
    for start, stop in shares.ranges[axis.rank]:
        whole.narrow(dim, start, stop - start).copy_(x.narrow(dim, offset, stop - start))
        offset += stop - start
    return whole


def gather_along(x: Tensor, dim: int, shares: Cut, axis: Axis) -> Tensor:
    """Return the whole dim, with every rank's slice in its place."""
    if shares.is_even:
        # inductor knows these forms: it can compute a product piece by piece as pieces arrive
        joined = joined_along_first(x, axis)
        return torch.cat(joined.chunk(axis.size), dim) if dim else joined
    shapes = [_resized(x, dim, size) for size in shares.sizes]
    return _assemble(exchanged_pieces([x] * axis.size, shapes, axis), dim, shares)


def sum_scatter_along(x: Tensor, dim: int, shares: Cut, axis: Axis) -> Tensor:
    """Sum every rank's tensor and keep this rank's slice of a dim."""
    if shares.is_even:
        return sum_scattered(torch.cat(x.chunk(axis.size, dim)) if dim else x, axis)
    pieces = [pick(x, dim, ranges) for ranges in shares.ranges]
    shape = pieces[axis.rank].shape
    return torch.stack(exchanged_pieces(pieces, [shape] * axis.size, axis)).sum(0, dtype=x.dtype)


def exchange_along(
    x: Tensor, gather_dim: int, split_dim: int, gather_cut: Cut, split_cut: Cut, axis: Axis
) -> Tensor:
    """Make one dim whole while cutting another."""
    if gather_cut.is_even and split_cut.is_even:
        stack = exchanged(_split(x, split_dim, axis.size), axis)
        # the slices of dim 0, concatenated along the dim that they were cut from
        return stack.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()
    pieces = [pick(x, split_dim, ranges) for ranges in split_cut.ranges]
    mine = _resized(x, split_dim, split_cut.sizes[axis.rank])
    shapes = [(*mine[:gather_dim], size, *mine[gather_dim + 1 :]) for size in gather_cut.sizes]
    return _assemble(exchanged_pieces(pieces, shapes, axis), gather_dim, gather_cut)


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _split(x: Tensor, dim: int, count: int) -> Tensor:
    """Stack equal slices of a dim in a new dim 0."""
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0)


def _assemble(pieces: list[Tensor], dim: int, shares: Cut) -> Tensor:
    """Join the pieces of all ranks: each range gets its place in the whole dim."""
    placed = []
    for piece, ranges in zip(pieces, shares.ranges, strict=True):
        offset = 0
        for start, stop in ranges:
            placed.append((start, piece.narrow(dim, offset, stop - start)))
            offset += stop - start
    placed.sort(key=lambda item: item[0])
    return torch.cat([piece for _, piece in placed], dim)
