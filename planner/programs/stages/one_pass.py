"""Finds recompute modes if a step has only one backward, which frees saved tensors on its way.

The modes of the layers fit if, for each layer l,

    Σ_{i ≤ l} saved_i  +  other memory while l runs  ≤  the rank's remaining memory

Other memory includes what the nearest layer before l has saved on the host: it comes back while l
runs. Layers are added from the first one on. A combination of modes for the layers so far is
dropped if another one has neither a higher cost (seconds, or peak bytes) nor more saved bytes, and
has as much to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.prediction import Recompute
from autopar.planner.costs.steps.memory import moments_of_one_pass
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.programs.stages.mixes import Mixes, MixFloats, Numbers, ordered_modes
from autopar.planner.programs.stages.question import Content, StageQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """A recompute mode of a layer."""

    seconds: float  # of its backward
    saved_bytes: int
    needed_bytes: int  # while it runs, beside tensors saved by it and earlier layers
    host_saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Combinations:
    """Combinations for the first layers: cost, saved bytes, and each layer's mode."""

    taken: MixFloats
    saved: MixFloats
    beside: MixFloats  # bytes that the last layer on the host has saved there
    modes: Numbers  # [combination, layer], indices of the class's modes


# (cost of the layers before, all bytes while the next layer runs, its seconds) → cost with it
_CostWith = Callable[[MixFloats, MixFloats, float], MixFloats]


def fitting_mixes(question: StageQuestion, kind: int, content: Content, room_bytes: float) -> Mixes:
    """Return the mixes that fit into `room_bytes` and that no other beats, fastest first."""

    def seconds(taken: MixFloats, needed: MixFloats, more: float) -> MixFloats:
        return np.where(needed <= room_bytes, taken + more, np.inf)

    return _mixes(question, kind, content, _unbeaten_ways(question, kind, content, seconds))


def lightest_mix(question: StageQuestion, kind: int, content: Content) -> Mixes:
    """Return the mix with the lowest peak."""

    def peak(taken: MixFloats, needed: MixFloats, _: float) -> MixFloats:
        return np.maximum(taken, needed)

    ways = _unbeaten_ways(question, kind, content, peak)
    return _mixes(question, kind, content, ways).taken(np.array([int(np.argmin(ways.taken))]))


def _unbeaten_ways(
    question: StageQuestion, kind: int, content: Content, taking: _CostWith
) -> _Combinations:
    none = np.zeros(1)
    ways = _Combinations(
        taken=none, saved=none, beside=none, modes=np.zeros((1, 0), dtype=np.int64)
    )
    for modes in _layers(question, kind, content):
        every = [_extended(ways, place, one, taking) for place, one in enumerate(modes)]
        taken = np.concatenate([one.taken for one in every])
        saved = np.concatenate([one.saved for one in every])
        beside = np.concatenate([one.beside for one in every])
        kept = _unbeaten(taken, saved, beside)
        ways = _Combinations(
            taken=taken[kept],
            saved=saved[kept],
            beside=beside[kept],
            modes=np.concatenate([one.modes for one in every])[kept],
        )
    return ways


def _extended(ways: _Combinations, place: int, mode: _Mode, taking: _CostWith) -> _Combinations:
    """Return the combinations with one more layer in one mode."""
    saved = ways.saved + mode.saved_bytes
    column = np.full((len(saved), 1), place, dtype=np.int64)
    return _Combinations(
        taken=taking(ways.taken, saved + ways.beside + mode.needed_bytes, mode.seconds),
        saved=saved,
        beside=np.full(len(saved), float(mode.host_saved_bytes))
        if mode.host_saved_bytes
        else ways.beside,
        modes=np.concatenate([ways.modes, column], axis=1),
    )


def _unbeaten(taken: MixFloats, saved: MixFloats, beside: MixFloats) -> Numbers:
    """Return the indices of the combinations that fit and that no other beats, by cost."""
    order = np.lexsort((saved, taken))
    order = order[np.isfinite(taken[order])]
    is_less = np.ones(len(order), dtype=np.bool_)
    for value in np.unique(beside[order]):
        alike = np.flatnonzero(beside[order] == value)
        least = np.minimum.accumulate(saved[order[alike]])
        is_less[alike[1:]] = least[1:] < least[:-1]
    kept: npt.NDArray[np.int64] = order[is_less]
    return kept


def _layers(question: StageQuestion, kind: int, content: Content) -> Sequence[Sequence[_Mode]]:
    """Return the modes of each layer, in the order of its class."""
    plain = stage_load([question.layer(kind, number)[Recompute.NONE] for number in content])
    single = [replace(work, count=1) for work in plain.works for _ in range(work.count)]
    moments = [*moments_of_one_pass(single, question.arrangement)][::-1]
    return [
        [
            _Mode(
                seconds=cost.backward_seconds,
                saved_bytes=cost.saved_bytes,
                needed_bytes=moment.needed_bytes(cost),
                host_saved_bytes=cost.host_saved_bytes,
            )
            for mode in ordered_modes(question, kind, number)
            for cost in (question.layer(kind, number)[mode],)
        ]
        for number, moment in zip(content, moments, strict=True)
    ]


def _mixes(question: StageQuestion, kind: int, content: Content, ways: _Combinations) -> Mixes:
    """Return the combinations as numbers of layers per class and mode."""
    classes, own = np.array(content), dict.fromkeys(content)
    columns, counts, again = [], [], []
    for number in own:
        for place, mode in enumerate(ordered_modes(question, kind, number)):
            columns.append((number, mode))
            counts.append((ways.modes[:, classes == number] == place).sum(axis=1))
            again.append(question.layer(kind, number)[mode].recompute_seconds > 0)
    numbers = np.stack(counts, axis=1)
    return Mixes(
        columns=tuple(columns),
        numbers=numbers,
        seconds=ways.taken,
        saved=ways.saved,
        work=np.zeros(len(ways.saved)),
        again=(numbers @ np.array(again, dtype=np.int64)) > 0,
    )
