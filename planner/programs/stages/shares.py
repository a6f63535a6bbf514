"""Divides the memory of each rank among its stages, before the stages are chosen.

One stage per rank has all of it. With several, each gets its share, so that stages stay independent
of each other. What a share has to hold is read off an even split of the layers:

    what its layers need while they run is set aside once, for only one stage runs at a time;
    each stage holds all its layers the heaviest way, which computes nothing again;
    until they fit together, stages are made lighter layer by layer, the one with most microbatches
    in flight first, for it saves most; what is left then goes to the stage that was made lighter
    last, or to all by their microbatches in flight if none had to be.

That order is the same on every rank: the slowest stage of a round sets its pace, so it pays to
compute again in one round on all ranks, and in no other. More memory never makes a share smaller,
which the bounds rely on. Plans that fit their shares fit the rank; one that fits the rank, but not
the shares, is not searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.problem import (
    LayerChoices,
    LayerOption,
    Options,
    StageLimit,
    StageLimits,
)

Bytes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The memory of a stage; of it, what is set aside for a layer that runs.

    Where nothing is set aside, the stage balances what stays against what is transient.
    """

    memory_bytes: int
    reserved_bytes: int | None = None

    def room_bytes(self, transient_bytes: int) -> int:
        """Return what may stay beside at most so much that is transient."""
        return self.memory_bytes - (
            transient_bytes if self.reserved_bytes is None else self.reserved_bytes
        )

    def fits(self, resident_bytes: Bytes, transient_bytes: Bytes) -> Flags:
        """Return which amounts fit."""
        if self.reserved_bytes is None:
            return np.asarray(resident_bytes + transient_bytes <= self.memory_bytes)
        room = self.room_bytes(self.reserved_bytes)
        return (transient_bytes <= self.reserved_bytes) & (resident_bytes <= room)


def levels_of(options: Iterable[Options], share: Share) -> tuple[int, ...]:
    """Return the transient memories that a mix of options may keep to, and that leave most room."""
    if share.reserved_bytes is not None:
        return (share.reserved_bytes,)
    return tuple(sorted({option.transient_bytes for group in options for option in group}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A stage of the even split: what it holds, each time lighter than before; what it reserves."""

    in_flight: int
    resident_bytes: tuple[int, ...]
    transient_bytes: int


def shares_of(choices: LayerChoices, limits: StageLimits) -> tuple[Share, ...]:
    """Return the memory that each stage may use."""
    if limits.stages_per_rank == 1:
        return tuple(Share(memory_bytes=stage.memory_bytes) for stage in limits.stages)
    shares: dict[int, Share] = {}
    for numbers, stages in _even_ranks(choices, limits):
        reserved = max(stage.transient_bytes for stage in stages)
        rooms = _rooms(stages, limits.stages[numbers[0]].memory_bytes - reserved)
        for number, room in zip(numbers, rooms, strict=True):
            shares[number] = Share(memory_bytes=room + reserved, reserved_bytes=reserved)
    return tuple(shares[number] for number in range(len(shares)))


def lightest_bytes(choices: LayerChoices, limits: StageLimits) -> int:
    """Return what the fullest rank needs of an even split with every layer at its lightest."""
    return max(
        max(stage.transient_bytes for stage in stages)
        + sum(stage.resident_bytes[-1] for stage in stages)
        for _, stages in _even_ranks(choices, limits)
    )


def stages_by_rank(limits: StageLimits) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank."""
    found: dict[int, list[int]] = {}
    for stage in range(len(limits.stages)):
        found.setdefault(limits.rank_of(stage), []).append(stage)
    return tuple(map(tuple, found.values()))


def _rooms(stages: tuple[_Stage, ...], room: int) -> list[int]:
    """Divide what may stay on one rank among its stages."""
    held = [stage.resident_bytes[0] for stage in stages]
    in_turn = sorted(range(len(stages)), key=lambda number: -stages[number].in_flight)
    for number in in_turn:
        heavier = held[number]
        for lighter in stages[number].resident_bytes:
            if sum(held) <= room:
                break
            heavier, held[number] = held[number], lighter
        left = room - sum(held)
        if left >= 0 and heavier > held[number]:
            held[number] = min(heavier, held[number] + left)
            return held
    left, in_flight = room - sum(held), sum(stage.in_flight for stage in stages)
    return [
        own + left * stage.in_flight // in_flight for own, stage in zip(held, stages, strict=True)
    ]


def _even_ranks(
    choices: LayerChoices, limits: StageLimits
) -> Iterator[tuple[tuple[int, ...], tuple[_Stage, ...]]]:
    """Yield the stages of each rank, and what they are if the layers are split evenly."""
    count, stages = len(choices.layers), len(limits.stages)
    known: dict[object, _Stage] = {}
    ways: dict[object, tuple[LayerOption, ...]] = {}
    for numbers in stages_by_rank(limits):
        own = []
        for number in numbers:
            limit = limits.stages[number]
            layers = choices.layers[count * number // stages : count * (number + 1) // stages]
            key = limit.device_class, limit.in_flight, limit.deferred, layers
            if key not in known:
                groups = choices.options[limit.device_class]
                for c in dict.fromkeys(layers):
                    if (key[:3], c) not in ways:
                        ways[key[:3], c] = _ways(groups[c], limit)
                known[key] = _stage([ways[key[:3], c] for c in layers], limit)
            own.append(known[key])
        yield numbers, tuple(own)


def _stage(ways: list[tuple[LayerOption, ...]], limit: StageLimit) -> _Stage:
    """Return a stage whose layers are made lighter one after the other, way by way."""
    held = [limit.resident_bytes(own[0]) for own in ways]
    sizes = [sum(held)]
    for level in range(1, max(map(len, ways), default=1)):
        for place, own in enumerate(ways):
            if level < len(own):
                held[place] = limit.resident_bytes(own[level])
                sizes.append(sum(held))
    transient = max((option.transient_bytes for own in ways for option in own), default=0)
    return _Stage(in_flight=limit.in_flight, resident_bytes=tuple(sizes), transient_bytes=transient)


def _ways(options: Options, limit: StageLimit) -> tuple[LayerOption, ...]:
    """Return the options of a layer, the fastest first, each lighter than all that are faster."""
    ways: list[LayerOption] = []
    for option in sorted(options, key=lambda one: (one.seconds, limit.resident_bytes(one))):
        if not ways or limit.resident_bytes(option) < limit.resident_bytes(ways[-1]):
            ways.append(option)
    return tuple(ways)
