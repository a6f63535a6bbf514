"""Finds the least memory that any plan needs, and what stages lack of it."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.problem import (
    LayerChoices,
    StageLimit,
    StageLimits,
    boundary_windows,
)
from autopar.planner.programs.stages.shares import (
    levels_of,
    lightest_bytes,
    shares_of,
    stages_by_rank,
)

Bytes = npt.NDArray[np.int64]

_ENDLESS = 1 << 60


def memory_shortfall_bytes(choices: LayerChoices, limits: StageLimits) -> int | None:
    """Return the bytes that every stage lacks at least, None if no memory makes a plan.

    The least maximum, over all ways to cut the layers, of what a stage needs beyond what it has.
    """
    windows = boundary_windows(choices, len(limits.stages))
    shares = shares_of(choices, limits)
    least = np.full(len(choices.boundaries), _ENDLESS)
    least[0] = -_ENDLESS
    needs: dict[tuple[int, int, int, tuple[int, ...]], Bytes] = {}
    for stage, (limit, share) in enumerate(zip(limits.stages, shares, strict=True)):
        levels = levels_of(choices.options[limit.device_class], share)
        key = (limit.device_class, limit.in_flight, limit.deferred, levels)
        if key not in needs:
            needs[key] = _lightest_bytes(choices, limit, levels)
        worst = np.maximum(least[:, None], needs[key] - share.memory_bytes).min(axis=0)
        least = np.where(_is_legal(choices, windows[stage + 1]), worst, _ENDLESS)
    shortfall = int(least[-1])
    return shortfall if shortfall < _ENDLESS // 2 else None


def least_memory_bytes(choices: LayerChoices, limits: StageLimits) -> int | None:
    """Return the least memory, the same for every rank, with which a plan exists; None: never.

    From nothing on, what the stages lack is added, by as much as cannot be too much: of what a
    rank gets, a stage with K_p microbatches in flight has K_p / Σ K as long as an even split does
    not fit; and at most all of it from then on.
    """
    in_flight = [
        [limits.stages[stage].in_flight for stage in own] for own in stages_by_rank(limits)
    ]
    sharing = min(sum(own) / max(own) for own in in_flight)
    even = lightest_bytes(choices, limits)
    memory = 0
    while True:
        shortfall = memory_shortfall_bytes(choices, with_memory(limits, memory))
        if shortfall is None or shortfall <= 0:
            return None if shortfall is None else memory
        memory = max(
            memory + max(1, shortfall), min(even, memory + max(1, int(shortfall * sharing)))
        )


def with_memory(limits: StageLimits, memory_bytes: int) -> StageLimits:
    """Return the limits with the same memory on every rank."""
    stages = tuple(replace(stage, memory_bytes=memory_bytes) for stage in limits.stages)
    return replace(limits, stages=stages)


def _is_legal(choices: LayerChoices, window: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return for each boundary whether stages may meet there."""
    earliest, latest = window
    is_allowed = np.array([cut.is_allowed for cut in choices.boundaries])
    places = np.arange(len(is_allowed))
    return is_allowed & (earliest <= places) & (places <= latest)


def _lightest_bytes(choices: LayerChoices, limit: StageLimit, levels: tuple[int, ...]) -> Bytes:
    """Return the least memory of the layers between each two boundaries; endless from behind."""
    groups = choices.options[limit.device_class]
    count = len(choices.layers)
    least = np.full((count + 1, count + 1), _ENDLESS)
    for level in levels:
        lightest = [
            min(
                (limit.resident_bytes(o) for o in group if o.transient_bytes <= level),
                default=None,
            )
            for group in groups
        ]
        own = [lightest[c] for c in choices.layers]
        before = np.cumsum([0, *(0 if one is None else one for one in own)])
        missing = np.cumsum([0, *(one is None for one in own)])
        memory = before[None, :] - before[:, None] + level
        is_whole = missing[None, :] == missing[:, None]
        least = np.minimum(least, np.where(is_whole, memory, _ENDLESS))
    least[np.tril_indices(count + 1)] = _ENDLESS
    return least
