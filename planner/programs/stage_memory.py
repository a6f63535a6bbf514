"""Divides the memory of each rank among its stages, and finds the least memory any plan needs.

One stage per rank has all of it. With several, each gets its share before the search, so that
stages stay independent of each other:

    share of p  =  need of p  +  (memory − Σ need) · K_p / Σ K       sums over the rank's stages

where the need is what an even split of the layers takes on p when every layer is as light as it can
be. Plans that fit the shares fit the rank (a stage's transient memory counts in its own share,
though only one stage runs at a time), so no plan is ever too big; one that fits the rank, but not
the shares, is not searched.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stage_problem import (
    LayerChoices,
    LayerOption,
    StageLimits,
    boundary_windows,
)

Bytes = npt.NDArray[np.int64]

_ENDLESS = 1 << 60


def stage_memory_bytes(choices: LayerChoices, limits: StageLimits) -> tuple[int, ...]:
    """Return the memory that each stage may use."""
    if limits.stages_per_rank == 1:
        return tuple(stage.memory_bytes for stage in limits.stages)
    needs = [_even_need_bytes(choices, limits, stage) for stage in range(len(limits.stages))]
    shares = list(needs)
    for mine in _stages_by_rank(limits).values():
        left = limits.stages[mine[0]].memory_bytes - sum(needs[p] for p in mine)
        in_flight = sum(limits.stages[p].in_flight for p in mine)
        for p in mine:
            shares[p] += left * limits.stages[p].in_flight // in_flight
    return tuple(shares)


def _stages_by_rank(limits: StageLimits) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stage in range(len(limits.stages)):
        found.setdefault(limits.rank_of(stage), []).append(stage)
    return found


def _even_need_bytes(choices: LayerChoices, limits: StageLimits, stage: int) -> int:
    """Return the memory of a stage's part of an even split with the lightest options."""
    limit, layers = limits.stages[stage], choices.layers
    first, stop = (len(layers) * p // len(limits.stages) for p in (stage, stage + 1))
    resident = transient = 0
    for layer_class, number in Counter(layers[first:stop]).items():
        options = choices.options[limit.device_class][layer_class]
        lightest = min(options, key=lambda option: _alone_bytes(option, limit.in_flight))
        resident += number * lightest.resident_bytes(limit.in_flight)
        transient = max(transient, lightest.transient_bytes)
    return resident + transient


def _alone_bytes(option: LayerOption, in_flight: int) -> int:
    return option.resident_bytes(in_flight) + option.transient_bytes


def memory_shortfall_bytes(choices: LayerChoices, limits: StageLimits) -> int | None:
    """Return the bytes that every stage lacks at least, None if no memory makes a plan.

    The least maximum, over all ways to cut the layers, of what a stage needs beyond what it has.
    """
    windows = boundary_windows(choices, len(limits.stages))
    has = stage_memory_bytes(choices, limits)
    least = np.full(len(choices.boundaries), _ENDLESS)
    least[0] = -_ENDLESS
    needs: dict[tuple[int, int], Bytes] = {}
    for stage, limit in enumerate(limits.stages):
        key = (limit.device_class, limit.in_flight)
        if key not in needs:
            needs[key] = _lightest_bytes(choices, *key)
        worst = np.maximum(least[:, None], needs[key] - has[stage]).min(axis=0)
        least = np.where(_is_legal(choices, windows[stage + 1]), worst, _ENDLESS)
    shortfall = int(least[-1])
    return shortfall if shortfall < _ENDLESS // 2 else None


def least_memory_bytes(choices: LayerChoices, limits: StageLimits) -> int | None:
    """Return the least memory, the same for every rank, with which a plan exists; None: never.

    From nothing on, what the stages lack is added, by as much as cannot be too much: of what a
    rank gets, a stage with K_p microbatches in flight has K_p / Σ K.
    """
    in_flight = [
        [limits.stages[stage].in_flight for stage in own]
        for own in _stages_by_rank(limits).values()
    ]
    sharing = min(sum(own) / max(own) for own in in_flight)
    memory = 0
    while True:
        shortfall = memory_shortfall_bytes(choices, with_memory(limits, memory))
        if shortfall is None or shortfall <= 0:
            return None if shortfall is None else memory
        memory += max(1, int(shortfall * sharing))


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


def _lightest_bytes(choices: LayerChoices, device_class: int, in_flight: int) -> Bytes:
    """Return the least memory of the layers between each two boundaries; endless from behind."""
    groups = choices.options[device_class]
    levels = sorted({option.transient_bytes for group in groups for option in group})
    count = len(choices.layers)
    least = np.full((count + 1, count + 1), _ENDLESS)
    for level in levels:
        lightest = [
            min(
                (o.resident_bytes(in_flight) for o in group if o.transient_bytes <= level),
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
