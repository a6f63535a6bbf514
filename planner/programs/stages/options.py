"""Prices layers on one stage: the least time of all mixes of their options that fit in its memory.

A mix says how many layers of each class use each option. It fits when

    Σ (fixed + K · saved + D · deferred)  +  max transient  ≤  memory of the stage

so for every level X of transient memory that an option has (or for the one that the stage's share
sets aside), the options up to X are summed against the memory that X leaves: Pareto sums of
(memory, time, time once per step), one layer at a time.
Equal layers are interchangeable: a sum depends on how many layers of each class there are, and each
count is summed once. Sums are exact; only seconds are rounded, to ticks.

A tick is a fraction of the time of all layers, so small that what is below it drowns in floating
point anyway; in ticks, equal times are equal. The option at position k of its class costs k ticks
more than its time says: among equals the simpler mix wins.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.problem import Options, StageLimit
from autopar.planner.programs.stages.shares import Share, levels_of

Ticks = npt.NDArray[np.int64]
Counts = tuple[int, ...]  # layers of each class

NEVER = 1 << 60  # ticks of what does not fit; the sum of a few still fits into 64 bits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Front:
    """The mixes of some layers that no other betters: a mix of one layer less, and an option."""

    memory: Ticks
    ticks: Ticks
    steps: Ticks
    parents: Ticks
    options: Ticks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Choices:
    """The options of one class on this kind of stage, as columns."""

    memory: Ticks
    ticks: Ticks
    steps: Ticks
    transient: Ticks
    positions: Ticks


_ZERO = np.zeros(1, np.int64)
_NO_LAYER = _Front(memory=_ZERO, ticks=_ZERO, steps=_ZERO, parents=_ZERO, options=_ZERO)


class StageMixes:
    """All mixes on one kind of stage: its device, its memory, its microbatches in flight."""

    def __init__(
        self,
        options: tuple[Options, ...],
        *,
        share: Share,
        limit: StageLimit,
        ticks_per_second: float,
    ) -> None:
        self._share = share
        self._widths = tuple(map(len, options))
        self._transients = tuple(tuple(o.transient_bytes for o in group) for group in options)
        self._levels = levels_of(options, share)
        self._choices = tuple(
            tuple(_choices(group, level, limit, ticks_per_second) for group in options)
            for level in self._levels
        )
        most = max(option.transient_bytes for group in options for option in group)
        self._free = tuple(_choices(group, most, limit, ticks_per_second) for group in options)
        self._fronts: tuple[dict[Counts, _Front], ...] = tuple({} for _ in self._levels)

    def uses(self, counts: Counts, number: int) -> tuple[Counts, ...]:
        """Return for each class how many layers use each option in one of the best mixes.

        Mixes are numbered as `times` has them.
        """
        _, _, places = self._best(counts)
        level, member = places[number]
        return self._uses(counts, level=level, member=member)

    def _best(self, counts: Counts) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Return ticks, step ticks and places of the mixes that fit and are nowhere bettered.

        A place is a level and a member of its front. The fastest comes first.
        """
        tried = self._levels_of(counts)
        fronts = [self._front(level, counts) for level in tried]
        ticks = np.concatenate([front.ticks for front in fronts])
        steps = np.concatenate([front.steps for front in fronts])
        begins = np.cumsum([0, *(len(front.ticks) for front in fronts)])
        best = _nondominated(np.zeros_like(ticks), ticks, steps)
        owners = np.searchsorted(begins, best, side="right") - 1
        levels = [tried[owner] for owner in owners.tolist()]
        places = zip(levels, (best - begins[owners]).tolist(), strict=True)
        return ticks[best].tolist(), steps[best].tolist(), list(places)

    def _levels_of(self, counts: Counts) -> list[int]:
        """Return the levels that an option of these layers has and that each layer can keep to."""
        own = [t for t, count in zip(self._transients, counts, strict=True) if count]
        least = max(min(transients) for transients in own)
        if self._share.reserved_bytes is not None:
            return [at for at, level in enumerate(self._levels) if level >= least]
        useful = {t for transients in own for t in transients if t >= least}
        return [at for at, level in enumerate(self._levels) if level in useful]

    def times(self, kinds: Ticks) -> tuple[Ticks, Ticks]:
        """Return ticks and step ticks [mix, row] of the best mixes of each row of counts.

        Rows have as many mixes as the richest of them; those that a row lacks take for ever. Most
        rows need no sums: their fastest options fit together, or their lightest do not.
        """
        ticks, steps = self._fastest(kinds)
        unsettled = np.flatnonzero((ticks == NEVER) & self._fits_somehow(kinds))
        best = {row: self._best(tuple(kinds[row].tolist())) for row in unsettled.tolist()}
        richest = max((len(own) for own, _, _ in best.values()), default=1)
        all_ticks = np.full((max(1, richest), len(kinds)), NEVER)
        all_steps = np.full_like(all_ticks, NEVER)
        all_ticks[0], all_steps[0] = ticks, steps
        for row, (own_ticks, own_steps, _) in best.items():
            all_ticks[: len(own_ticks), row] = own_ticks
            all_steps[: len(own_steps), row] = own_steps
        return all_ticks, all_steps

    def _fastest(self, kinds: Ticks) -> tuple[Ticks, Ticks]:
        """Return the times of each class's fastest option where nothing betters it and it fits."""
        free = self._free
        at = [int(np.argmin(group.ticks)) for group in free]
        pairs = list(zip(free, at, strict=True))
        memory = _column(group.memory[k] for group, k in pairs)
        ticks = _column(group.ticks[k] for group, k in pairs)
        steps = _column(group.steps[k] for group, k in pairs)
        transients = _column(group.transient[k] for group, k in pairs)
        least_steps = _column(group.steps.min() for group in free)
        transient = np.where(kinds > 0, transients, 0).max(axis=1)
        settles = self._share.fits(kinds @ memory, transient)
        settles &= kinds @ (steps - least_steps) == 0
        return np.where(settles, kinds @ ticks, NEVER), np.where(settles, kinds @ steps, NEVER)

    def _fits_somehow(self, kinds: Ticks) -> npt.NDArray[np.bool_]:
        """Return which rows fit at some level with the lightest options up to it."""
        fits = np.zeros(len(kinds), bool)
        for level, groups in zip(self._levels, self._choices, strict=True):
            lightest = _column(group.memory.min(initial=NEVER) for group in groups)
            is_missing = lightest == NEVER
            memory = kinds @ np.where(is_missing, 0, lightest)
            room = self._share.room_bytes(level)
            fits |= (memory <= room) & ~kinds[:, is_missing].any(axis=1)
        return fits

    def _front(self, level: int, counts: Counts) -> _Front:
        """Return the mixes of some layers with options up to a level, summed layer by layer."""
        known = self._fronts[level]
        missing = []
        while any(counts) and counts not in known:
            missing.append(counts)
            counts = _without_last(counts)
        front = known[counts] if any(counts) else _NO_LAYER
        room = self._share.room_bytes(self._levels[level])
        for counts in reversed(missing):
            front = _with_one_more(front, self._choices[level][_last(counts)], room)
            known[counts] = front
        return front

    def _uses(self, counts: Counts, *, level: int, member: int) -> tuple[Counts, ...]:
        """Return how many layers of each class use each option, by the parents of a mix."""
        uses = [[0] * width for width in self._widths]
        while any(counts):
            front = self._front(level, counts)
            uses[_last(counts)][front.options[member]] += 1
            member = int(front.parents[member])
            counts = _without_last(counts)
        return tuple(map(tuple, uses))


def _choices(
    group: Options, transient_bytes: int, limit: StageLimit, ticks_per_second: float
) -> _Choices:
    """Return the options of a class up to a level of transient memory, as columns."""
    kept = [
        (k, option) for k, option in enumerate(group) if option.transient_bytes <= transient_bytes
    ]
    return _Choices(
        memory=_column(limit.resident_bytes(option) for _, option in kept),
        ticks=_column(round(option.seconds * ticks_per_second) + k for k, option in kept),
        steps=_column(round(option.step_seconds * ticks_per_second) for _, option in kept),
        transient=_column(option.transient_bytes for _, option in kept),
        positions=_column(k for k, _ in kept),
    )


def _column(values: Iterable[int]) -> Ticks:
    return np.array(list(values), dtype=np.int64)


def _last(counts: Counts) -> int:
    """Return the last class that has a layer."""
    return max(number for number, count in enumerate(counts) if count)


def _without_last(counts: Counts) -> Counts:
    last = _last(counts)
    return (*counts[:last], counts[last] - 1, *counts[last + 1 :])


def _with_one_more(front: _Front, choices: _Choices, room: int) -> _Front:
    """Return the sums of each mix and each option that fit in the room and that nothing betters."""
    width = len(choices.ticks)
    memory = np.add.outer(front.memory, choices.memory).ravel()
    ticks = np.add.outer(front.ticks, choices.ticks).ravel()
    steps = np.add.outer(front.steps, choices.steps).ravel()
    fits = np.flatnonzero(memory <= room)
    keep = fits[_nondominated(memory[fits], ticks[fits], steps[fits])]
    return _Front(
        memory=memory[keep],
        ticks=ticks[keep],
        steps=steps[keep],
        parents=keep // width,
        options=choices.positions[keep % width],
    )


def _nondominated(memory: Ticks, ticks: Ticks, steps: Ticks) -> Ticks:
    """Return where no other is at most as large in all three, one of each set of equals."""
    order: Ticks = np.lexsort((memory, steps, ticks))
    if len(order) == 0:
        return order
    if steps.min() == steps.max():
        lightest_before = np.minimum.accumulate(memory[order])[:-1]
        return np.extract(np.append(True, memory[order][1:] < lightest_before), order)
    return order.take(_stairs(memory[order].tolist(), steps[order].tolist()))


def _stairs(memory: list[int], steps: list[int]) -> list[int]:
    """Return which points, in turn, are not above an earlier one in both memory and steps.

    The lowest so far form a staircase: steps rise, memory falls.
    """
    stair_steps: list[int] = []
    stair_memory: list[int] = []
    keep = []
    for at, (height, step) in enumerate(zip(memory, steps, strict=True)):
        below = bisect_right(stair_steps, step)
        if below and stair_memory[below - 1] <= height:
            continue
        above = below
        while above < len(stair_steps) and stair_memory[above] >= height:
            above += 1
        stair_steps[below:above] = [step]
        stair_memory[below:above] = [height]
        keep.append(at)
    return keep
