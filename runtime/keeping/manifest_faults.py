"""Finds what in the description of a checkpoint contradicts itself: it may be anybody's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from autopar.runtime.keeping.manifest import Logical, Manifest, Stored, rank_file
from autopar.runtime.keeping.states import STATE, WEIGHT, Scalar
from autopar.runtime.shown import in_a_line
from autopar.runtime.tensor.cuts import Ranges

_MOST_PAIRS = 10_000_000  # of shards that are compared: seconds
_LARGEST = 2**63  # of a tensor's integers


def manifest_faults(manifest: Manifest) -> Iterator[str]:
    """Yield each contradiction, with its place."""
    names = [rank_file(rank) for rank in range(len(manifest.files))]
    if not names or sorted(manifest.files) != names:
        yield "files: they are not those of ranks 0 and on"
    if manifest.moment.updates > manifest.moment.step:
        yield "moment.updates: more than there were steps"
    yield from _of_tensors(manifest)
    for key, scalar in manifest.scalars.items():
        if not key.startswith(STATE) or not _is_made(scalar):
            yield f"scalars.{in_a_line(key)}: no number of a state"
    for name, one in manifest.exported.items():
        held = manifest.tensors.get(WEIGHT + name)
        if held is None or held.dtype.is_floating_point != one.dtype.is_floating_point:
            yield f"exported.{in_a_line(name)}: no such weight of this kind is among the tensors"


def _is_made(scalar: Scalar) -> bool:
    """Whether a tensor can be made of a number, where it is to be one."""
    value = scalar.value
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        return False
    kind = None if scalar.dtype is None else getattr(torch, scalar.dtype, None)
    return scalar.dtype is None or (isinstance(kind, torch.dtype) and value is not None)


def _of_tensors(manifest: Manifest) -> Iterator[str]:
    sizes: defaultdict[str, int] = defaultdict(int)
    pairs = _Pairs()
    for key, one in manifest.tensors.items():
        where = f"tensors.{in_a_line(key)}"
        if not key.startswith((WEIGHT, STATE)):
            yield f"{where}: neither a weight nor a state"
        fault = _of_shards(one, manifest) or _of_cover(one, pairs)
        if fault:
            yield f"{where}: {fault}"
            return  # what follows would be told of numbers that mean nothing
        for shard in one.shards:
            sizes[shard.file] += shard.chunks.elements * one.dtype.itemsize
    for name, size in sizes.items():
        if size > manifest.files[name].size_bytes:
            yield f"tensors: their shards in {name} have more bytes than it has"


def _of_shards(one: Logical, manifest: Manifest) -> str:
    """Return what is wrong with a shard by itself, if anything."""
    for shard in one.shards:
        if shard.file not in manifest.files:
            return f"a shard is in {in_a_line(shard.file)[:60]!r}, which is none of the files"
        ranges = shard.chunks.ranges
        if len(ranges) != len(one.shape):
            return f"a shard has {len(ranges)} dims, and the tensor {len(one.shape)}"
        for held, size in zip(ranges, one.shape, strict=True):
            if not _are_ranges(held, size):
                return f"a shard has no ranges of a dim of {size}"
    return ""


def _are_ranges(held: Ranges, size: int) -> bool:
    """Whether ranges lie within a dim, without anything twice."""
    ends = sorted(held)
    meet = any(first[1] > second[0] for first, second in pairwise(ends))
    return not meet and all(low <= high <= size for low, high in held)


class _Pairs:
    """How many pairs of shards may still be compared, of all tensors together."""

    def __init__(self) -> None:
        self.left = _MOST_PAIRS


def _of_cover(one: Logical, pairs: _Pairs) -> str:
    """Return what the shards of a tensor lack, or have twice, if anything."""
    held = sum(shard.chunks.elements for shard in one.shards)
    needed = math.prod(one.shape)
    if held != needed:
        return f"its shards hold {held:,} of {needed:,} elements"
    if needed and len(one.shards) > 1 and _overlap(one.shards, len(one.shape), pairs):
        return "some of its elements are in two shards"
    return "" if pairs.left > 0 else "it has more shards than can be compared"


def _overlap(shards: Sequence[Stored], dims: int, pairs: _Pairs) -> bool:
    """Whether two shards have an element in common: a sweep along the dim that is cut most."""
    cuts = [{ends for shard in shards for ends in shard.chunks.ranges[dim]} for dim in range(dims)]
    along = max(range(dims), key=lambda dim: len(cuts[dim]), default=0)
    every = sorted(
        (low, high, number)
        for number, shard in enumerate(shards)
        for low, high in shard.chunks.ranges[along]
        if low < high
    )
    open_now: list[tuple[int, int]] = []  # where each ends, and its number
    for low, high, number in every:
        open_now = [one for one in open_now if one[0] > low]
        pairs.left -= len(open_now)
        if pairs.left <= 0:
            return False
        for _, other in open_now:
            if other != number and _meet(shards[number], shards[other]):
                return True
        open_now.append((high, number))
    return False


def _meet(one: Stored, other: Stored) -> bool:
    """Whether two shards have ranges in common in every dim."""
    by_dim = zip(one.chunks.ranges, other.chunks.ranges, strict=True)
    return all(
        any(max(low, first) < min(high, last) for low, high in held for first, last in its)
        for held, its in by_dim
    )
