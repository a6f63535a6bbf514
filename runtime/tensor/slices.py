"""Cuts of tensors over ranks: their places, lengths and slices.

Turns the description of how a dim is cut into the ranges that each rank of an axis holds.

A dim is laid end to end of parts, each `count` blocks of `unit` elements; every part is cut over
the ranks by whole blocks, balanced, the first ranks taking one more where it does not divide. A
fused q-k-v weight of 12 heads of 64 is ((12, 64), (12, 64), (12, 64)): the shard of a concat is
the concat of the shards.

Remembers how long the dims of a microbatch are, of which each tensor rank holds a share.

57 tokens on two ranks are 29 and 28: a rank that has 29 cannot tell 57 from 58. What was cut whole
in this forward is known, and so is what a stage receives; two lengths with equal shares on some
rank (of a text and of its labels, say) are told apart by a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.ranks.transport import exchanged, exchanged_pieces, gathered, sum_scattered

Parts = tuple[tuple[int, int], ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """What every rank holds of one dim."""

    ranges: tuple[Ranges, ...]  # per rank, [start, stop) of the whole dim
    sizes: tuple[int, ...]  # per rank, how many elements that is
    is_even: bool  # one range per rank, all of one size

    @property
    def whole(self) -> int:
        """The size of the dim before it was cut."""
        return sum(self.sizes)


@lru_cache(maxsize=1024)
def cut(parts: Parts, size: int) -> Cut:
    """Cut a dim over the ranks of an axis."""
    ranges = tuple(part_ranges(parts, rank, size) for rank in range(size))
    sizes = tuple(sum(stop - start for start, stop in held) for held in ranges)
    is_even = len(parts) == 1 and parts[0][0] % size == 0
    return Cut(ranges, sizes, is_even)


def part_ranges(parts: Parts, rank: int, size: int) -> Ranges:
    """Find the non-empty ranges of the whole dim that one rank holds, in order."""
    ranges, start = [], 0
    for count, unit in parts:
        first, last = _blocks_before(count, rank, size), _blocks_before(count, rank + 1, size)
        if last > first:
            ranges.append((start + first * unit, start + last * unit))
        start += count * unit
    return tuple(ranges)


def _blocks_before(count: int, rank: int, size: int) -> int:
    """Count the blocks of the ranks before this one."""
    return rank * (count // size) + min(rank, count % size)


RECEIVED = "received_lengths"  # where a stage's module finds those of what it receives

_KNOWN: ContextVar[dict[int, None]] = ContextVar("lengths")  # of the forward that runs


def begin_anew(model: nn.Module) -> None:
    """Have each forward of a model know the lengths of its own microbatch alone."""
    model.register_forward_pre_hook(_forget)


def begins_anew(model: nn.Module) -> bool:
    """Whether the forwards of a model do so."""
    return _forget in model._forward_pre_hooks.values()


def _forget(module: nn.Module, _: object) -> None:
    _KNOWN.set(dict.fromkeys(module.__dict__.get(RECEIVED, ())))


def note_length(whole: int) -> None:
    """Note how long a dim is that is cut."""
    known = _KNOWN.get(None)
    if known is not None:
        known[whole] = None


def cut_of_share(local: int, axis: Axis, device: torch.device) -> Cut:
    """Return the cut of a dim of which this rank holds so many elements."""
    known = _KNOWN.get(None) or {}
    own = [whole for whole in known if _cut(whole, axis.size).sizes[axis.rank] == local]
    if not own:
        return _cut(local * axis.size, axis.size)
    clashes = any(_clash(own[0], other, axis.size) for other in known if other != own[0])
    if not clashes or detect_fake_mode() is not None:
        return _cut(own[0], axis.size)
    shares = gathered(torch.tensor([local], device=device), axis)
    return _cut(int(shares.sum()), axis.size)


def remembered() -> Callable[[], Any]:
    """Return what has the lengths that are known now known again, while a layer runs again."""
    known = _KNOWN.get(None)

    @contextmanager
    def again() -> Iterator[None]:
        if known is None:
            yield
            return
        token = _KNOWN.set(known)
        try:
            yield
        finally:
            _KNOWN.reset(token)

    return again


def receives(module: nn.Module, wholes: Iterable[int]) -> None:
    """Tell a stage's module how long the dims are whose shares it receives."""
    module.__dict__[RECEIVED] = tuple(wholes)


@lru_cache(maxsize=4096)
def _clash(one: int, other: int, size: int) -> bool:
    """Whether some rank holds as much of one length as of another."""
    pairs = zip(_cut(one, size).sizes, _cut(other, size).sizes, strict=True)
    return any(first == second for first, second in pairs)


def _cut(whole: int, size: int) -> Cut:
    return cut(((whole, 1),), size)


def pick(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Lay the ranges of a dim end to end in a new contiguous tensor."""
    if len(ranges) == 1:
        start, stop = ranges[0]
        return x.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)
    pieces = [x.narrow(dim, start, stop - start) for start, stop in ranges]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


def slice_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Keep this rank's slice of a whole dim."""
    return pick(x, dim, held.ranges[axis.rank])


def pad_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Put this rank's slice in its place among zeros."""
    whole = x.new_zeros(_resized(x, dim, held.whole))
    offset = 0
    for start, stop in held.ranges[axis.rank]:
        whole.narrow(dim, start, stop - start).copy_(x.narrow(dim, offset, stop - start))
        offset += stop - start
    return whole


def gather_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Lay every rank's slice of a dim in its place."""
    if held.is_even:
        return _merge(gathered(x, axis), dim)
    shapes = [_resized(x, dim, size) for size in held.sizes]
    return _assemble(exchanged_pieces([x] * axis.size, shapes, axis), dim, held)


def sum_scatter_along(x: Tensor, dim: int, held: Cut, axis: Axis) -> Tensor:
    """Sum every rank's tensor and keep this rank's slice of a dim."""
    if held.is_even:
        return sum_scattered(_split(x, dim, axis.size), axis)
    pieces = [pick(x, dim, ranges) for ranges in held.ranges]
    shape = pieces[axis.rank].shape
    return torch.stack(exchanged_pieces(pieces, [shape] * axis.size, axis)).sum(0, dtype=x.dtype)


def exchange_along(
    x: Tensor, gather_dim: int, split_dim: int, gather_cut: Cut, split_cut: Cut, axis: Axis
) -> Tensor:
    """Make one dim whole while cutting another."""
    if gather_cut.is_even and split_cut.is_even:
        return _merge(exchanged(_split(x, split_dim, axis.size), axis), gather_dim)
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


def _merge(stack: Tensor, dim: int) -> Tensor:
    """Lay the slices of dim 0 along the dim that they were cut from, contiguous for a view."""
    return stack.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _assemble(pieces: list[Tensor], dim: int, held: Cut) -> Tensor:
    """Lay each rank's ranges where they belong in the whole dim."""
    placed = []
    for piece, ranges in zip(pieces, held.ranges, strict=True):
        offset = 0
        for start, stop in ranges:
            placed.append((start, piece.narrow(dim, offset, stop - start)))
            offset += stop - start
    placed.sort(key=lambda item: item[0])
    return torch.cat([piece for _, piece in placed], dim)
