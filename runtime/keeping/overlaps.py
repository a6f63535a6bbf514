"""Finds where two shards of one tensor hold the same elements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

from autopar.runtime.tensor.chunks import Chunks
from autopar.runtime.tensor.cuts import Ranges

Place: TypeAlias = tuple[slice, ...]


def overlaps(one: Chunks, other: Chunks) -> Iterator[tuple[Place, Place]]:
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
