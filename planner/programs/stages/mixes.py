"""Lists the mixes of a stage, and moves borders of stages.

A mix says how many layers of each class run in each recompute mode. Layers of one class are equal,
so only these numbers matter. The fastest mixes come first. Of equal layers, those with most saved
bytes come first on the stage. If a step has only one backward, they come last: the backward reaches
them first, and frees what they saved before other layers make gradients. A backward first waits for
what its last layer on the host saved. The sums here are approximate: the exact time and memory are
priced for few mixes.

If a step has only one backward, it frees saved tensors on its way. The modes of the layers then fit
if, for each layer l,

    Σ_{i ≤ l} saved_i  +  other memory while l runs  ≤  the rank's remaining memory

Other memory includes what the nearest layer before l has saved on the host: it comes back while l
runs. Layers are added from the first one on. A combination of modes for the layers so far is
dropped if another one has neither a higher cost (seconds, or peak bytes) nor more saved bytes, and
as many bytes to come back from the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.prediction import Recompute
from autopar.planner.costs.steps.memory import layer_unsharded_bytes, moments_of_one_pass
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.programs.stages.question import Content, StageQuestion

MixFloats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
_FEW = 64  # if there are more mixes, beaten ones are dropped after each class


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mixes:
    """Mixes of the same layers: backward seconds, saved bytes, largest need of a running layer."""

    columns: tuple[tuple[int, Recompute], ...]  # a class and a mode
    numbers: Numbers  # [mix, column]
    seconds: MixFloats
    saved: MixFloats
    work: MixFloats
    fetch: MixFloats  # seconds until the tensors of the last layer on the host are back
    again: npt.NDArray[np.bool_]  # whether anything is recomputed, or on the host

    def __len__(self) -> int:
        return len(self.seconds)

    def taken(self, places: npt.NDArray[np.int64]) -> Mixes:
        """Return the mixes with these indices."""
        return Mixes(
            columns=self.columns,
            numbers=self.numbers[places],
            seconds=self.seconds[places],
            saved=self.saved[places],
            work=self.work[places],
            fetch=self.fetch[places],
            again=self.again[places],
        )

    def modes(self, place: int, content: Content) -> tuple[Recompute, ...]:
        """Return the mode of each layer in a mix; equal layers have them in the columns' order."""
        left: dict[int, list[Recompute]] = {}
        for (number, mode), count in zip(self.columns, self.numbers[place].tolist(), strict=True):
            left.setdefault(number, []).extend([mode] * count)
        queues = {number: iter(modes) for number, modes in left.items()}
        return tuple(next(queues[number]) for number in content)


def mixes_of(
    question: StageQuestion, kind: int, content: Content, *, waits_for_host: bool
) -> Mixes:
    """Return the mixes that no other beats in seconds, saved bytes and work, fastest first.

    The seconds include `fetch` if the stage `waits_for_host`.
    """
    found: Mixes | None = None
    counts = Counter(content)
    for number in reversed(dict.fromkeys(reversed(content))):  # by the last layer of each class
        own = _of_class(question, kind, number, counts[number])
        found = own if found is None else _together(found, own)
        if len(found) > _FEW:
            alike = (np.flatnonzero(found.fetch == one) for one in np.unique(found.fetch))
            found = found.taken(np.concatenate([own[_unbeaten(found.taken(own))] for own in alike]))
    assert found is not None
    if waits_for_host:
        found = replace(
            found, seconds=found.seconds + found.fetch, again=found.again | (found.fetch > 0)
        )
    best = _unbeaten(found)
    return found.taken(best[np.argsort(found.seconds[best], kind="stable")])


def _of_class(question: StageQuestion, kind: int, number: int, count: int) -> Mixes:
    """Return all ways to distribute equal layers over modes."""
    costs, arrangement = question.layer(kind, number), question.arrangement
    modes = ordered_modes(question, kind, number)
    numbers = np.array(list(_spreads(count, len(modes))), dtype=np.int64)
    own = [costs[mode] for mode in modes]
    work = np.array(
        [
            one.transient_bytes + one.host_saved_bytes + layer_unsharded_bytes(one, arrangement)
            for one in own
        ],
        float,
    )
    fetch = np.zeros(len(numbers))
    for place, one in enumerate(own):
        if one.host_saved_bytes:
            waits = one.host_saved_bytes / question.host_link_bytes_per_second
            fetch[numbers[:, place] > 0] = waits
    return Mixes(
        columns=tuple((number, mode) for mode in modes),
        numbers=numbers,
        seconds=numbers @ np.array([one.backward_seconds for one in own]),
        saved=numbers @ np.array([one.saved_bytes for one in own], float),
        work=np.where(numbers > 0, work, 0.0).max(axis=1),
        fetch=fetch,
        again=(numbers @ np.array([one.recompute_seconds > 0 for one in own], float)) > 0,
    )


def ordered_modes(question: StageQuestion, kind: int, number: int) -> list[Recompute]:
    """Return the modes of a class, in the order in which equal layers of a stage have them."""
    costs, is_one_pass = question.layer(kind, number), question.arrangement.is_one_pass
    return sorted(
        question.modes_of(kind, number),
        key=lambda mode: costs[mode].saved_bytes,
        reverse=not is_one_pass,
    )


def _spreads(count: int, modes: int) -> list[tuple[int, ...]]:
    """Return all divisions of `count` layers among modes; the first mode has fewer and fewer."""
    if modes == 1:
        return [(count,)]
    return [
        (own, *rest) for own in range(count, -1, -1) for rest in _spreads(count - own, modes - 1)
    ]


def _together(one: Mixes, other: Mixes) -> Mixes:
    left = np.repeat(np.arange(len(one)), len(other))
    right = np.tile(np.arange(len(other)), len(one))
    return Mixes(
        columns=(*one.columns, *other.columns),
        numbers=np.concatenate([one.numbers[left], other.numbers[right]], axis=1),
        seconds=one.seconds[left] + other.seconds[right],
        saved=one.saved[left] + other.saved[right],
        work=np.maximum(one.work[left], other.work[right]),
        fetch=np.where(other.fetch[right] > 0, other.fetch[right], one.fetch[left]),
        again=one.again[left] | other.again[right],
    )


def _unbeaten(mixes: Mixes) -> Numbers:
    """Return the indices of the mixes that no other beats in seconds, saved bytes and work.

    Such a mix has fewer saved bytes than all faster mixes that have at most its work bytes.
    """
    kept: list[Numbers] = []
    order = np.lexsort((mixes.work, mixes.saved, mixes.seconds))
    for level in np.unique(mixes.work):
        own = order[mixes.work[order] <= level]
        least = np.minimum.accumulate(mixes.saved[own])
        is_less = np.concatenate([[True], least[1:] < least[:-1]])
        kept.append(own[is_less])
    return np.unique(np.concatenate(kept))


def hull(seconds: Sequence[float], saved: Sequence[float]) -> list[int]:
    """Return the corners of the lower hull of time over saved bytes, the fastest first.

    Every mix lies on or above the lines between neighbouring corners.
    """
    corners: list[int] = []
    for place in sorted(range(len(seconds)), key=lambda one: (seconds[one], saved[one])):
        if corners and saved[place] >= saved[corners[-1]]:
            continue
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], place, seconds, saved):
            corners.pop()
        corners.append(place)
    return corners


def _is_above(
    one: int, middle: int, other: int, seconds: Sequence[float], saved: Sequence[float]
) -> bool:
    """Whether the middle corner is on or above the line between its neighbours."""
    whole = (seconds[other] - seconds[one]) * (saved[one] - saved[middle])
    return (seconds[middle] - seconds[one]) * (saved[one] - saved[other]) >= whole


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
        kept = _unbeaten_combinations(taken, saved, beside)
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


def _unbeaten_combinations(taken: MixFloats, saved: MixFloats, beside: MixFloats) -> Numbers:
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
        fetch=np.zeros(len(ways.saved)),
        again=(numbers @ np.array(again, dtype=np.int64)) > 0,
    )
