"""Tells whether a pipeline's layers can all find a place in time, rank by rank, in whole layers.

A rank r that holds n_r of the layers that repeat is done with them, at best, after

    w_r  +  m · (A_r(n_r) + E_r)            w: what it waits before its first microbatch and after
                                            its last; E: what it does beside these layers

where A_r(n) is exact: the least time of n whole layers in whole modes within the rank's memory,
each of its stages within its share. So a step of T seconds needs

    Σ_r max { n : w_r + m · (A_r(n) + E_r)  ≤  T }  ≥  number of layers

which is sharper than a bound of the slowest rank: memory is filled by layers, not by parts of them,
and a rank that waits longer holds less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.plan.bounds.bottleneck import Block, Mode, Room, StageRoom

_ROUNDING = 1e-9
_Way = tuple[float, float]  # of running a layer: seconds, and bytes that stay


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """What a rank takes beside its layers that repeat: once, and for every microbatch."""

    once_seconds: float
    each_seconds: float


def find_places(
    block: Block,
    room: Room,
    times: Sequence[RankTime],
    *,
    microbatches: int,
    within_seconds: float,
) -> bool:
    """Return whether all layers of a block find a place in a step of so many seconds."""
    stages: dict[StageRoom, tuple[float, ...]] = {}
    ranks: dict[tuple[StageRoom, ...], tuple[float, ...]] = {}
    most = within_seconds / microbatches
    total = 0
    for rooms, time in zip(room.ranks, times, strict=True):
        left = (within_seconds - time.once_seconds) / microbatches - time.each_seconds
        if left < 0:
            return False
        if rooms not in ranks:
            for one in rooms:
                if one not in stages:
                    stages[one] = _stage_seconds(block, one, room, most)
            ranks[rooms] = _rank_seconds([stages[one] for one in rooms], most)
        total += bisect_right(ranks[rooms], left * (1.0 + _ROUNDING)) - 1
    return total >= block.count


def _rank_seconds(stages: Sequence[Sequence[float]], most: float) -> tuple[float, ...]:
    """Return A(0), A(1), … up to a time: the best of all ways to share layers among stages."""
    found: Sequence[float] = (0.0,)
    for own in stages:
        longer = []
        for count in range(len(found) + len(own) - 1):
            first, last = max(0, count - len(own) + 1), min(count, len(found) - 1)
            least = min(found[i] + own[count - i] for i in range(first, last + 1))
            if least > most * (1.0 + _ROUNDING):
                break
            longer.append(least)
        found = longer
    return tuple(found)


def _stage_seconds(block: Block, stage: StageRoom, room: Room, most: float) -> tuple[float, ...]:
    """Return the least seconds of 0, 1, … whole layers of one stage, up to a time."""
    levels = _levels(block.modes, stage, room)
    found = [0.0]
    while len(found) <= block.count:
        least = min(_least_seconds(ways, len(found), left) for left, ways in levels)
        if least > most * (1.0 + _ROUNDING):
            break
        found.append(least)
    return tuple(found)


def _levels(
    modes: Sequence[Mode], stage: StageRoom, room: Room
) -> list[tuple[float, tuple[_Way, ...]]]:
    """Return what may stay beside each amount of transient memory, and the ways up to that.

    Ways go from the fastest to the lightest; others are never better.
    """
    size, reserved = (one / (1.0 + room.margin) for one in (stage.size_bytes, stage.reserved_bytes))
    needs = [max(mode.transient_bytes, room.transient_bytes) for mode in modes]
    found = []
    for level in dict.fromkeys(needs):
        ways: list[_Way] = []
        for seconds, held in sorted(
            (mode.seconds, room.state_bytes + stage.in_flight * mode.saved_bytes)
            for mode, need in zip(modes, needs, strict=True)
            if need <= level
        ):
            if not ways or held < ways[-1][1]:
                ways.append((seconds, held))
        left = size - max(reserved, level + room.unsharded_bytes)
        found.append((left * (1.0 + _ROUNDING), tuple(ways)))
    return found


def _least_seconds(ways: Sequence[_Way], count: int, left: float) -> float:
    """Return the least seconds of so many layers within the memory; infinite: they do not fit."""
    if count * ways[-1][1] > left:
        return float("inf")
    (seconds, held), *lighter = ways
    if count * held <= left:
        return count * seconds
    if len(lighter) == 1:
        ((slower, lean),) = lighter
        least = min(count, -int((left - count * held) // (held - lean)))
        return (count - least) * seconds + least * slower
    return min(
        own * seconds + _least_seconds(lighter, count - own, left - own * held)
        for own in range(count)
        if own * held <= left
    )
