"""Turns the description of how a dim is cut into the ranges that each rank of an axis holds.

A dim is laid end to end of parts, each `count` blocks of `unit` elements; every part is cut over
the ranks by whole blocks, balanced, the first ranks taking one more where it does not divide. A
fused q-k-v weight of 12 heads of 64 is ((12, 64), (12, 64), (12, 64)): the shard of a concat is
the concat of the shards.
"""

from dataclasses import dataclass
from functools import lru_cache

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
