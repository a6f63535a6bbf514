"""Makes the table of all intervals of layers that may be a stage: F_p(i, j), in ticks.

    F_p(i, j)  =  least time of a mix of layers i … j on stage p that fits
                  + what the boundaries i and j cost the stage on both sides of them

Intervals with as many layers of each class are of one kind, and each kind is priced once for all
stages with the same device, memory and microbatches in flight. Intervals that a forbidden cut, a
pin, or a stage left empty rules out take for ever. A stage of one interval more than another takes
as many ticks more as the square of its length: among equal plans the even one wins.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.planner.programs.stages.options import NEVER, Counts, StageMixes, Ticks
from autopar.planner.programs.stages.problem import (
    LayerChoices,
    LayerOption,
    StageLimit,
    StageLimits,
    boundary_windows,
)
from autopar.planner.programs.stages.shares import Share, shares_of

_TICKS_OF_ALL_LAYERS = 1 << 48  # HiGHS refuses a program with a coefficient over 1e15


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Layers `first` up to, not including, `stop` on a stage, run as its mix number `mix`."""

    stage: int
    first: int
    stop: int
    mix: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Where it is in the table."""
        return (self.mix, self.stage, self.first, self.stop - self.first - 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalTable:
    """Ticks per microbatch and per step, [mix, stage, first layer, length − 1]."""

    ticks: Ticks
    steps: Ticks

    @property
    def longest(self) -> int:
        """The most layers of an interval in the table."""
        return int(self.ticks.shape[3])


class StagePricing:
    """Prices intervals of layers on stages."""

    def __init__(self, choices: LayerChoices, limits: StageLimits) -> None:
        self.choices = choices
        self.limits = limits
        self.ticks_per_second = _ticks_per_second(choices, limits)
        self.windows = boundary_windows(choices, len(limits.stages))
        self._counts_before = _counts_before(choices)
        self._different_limits = tuple(set(limits.stages))
        self._mixes: dict[tuple[int, int, int, Share], StageMixes] = {}
        shares = shares_of(choices, limits)
        self._stage_mixes = tuple(self._mixes_of(p, share) for p, share in enumerate(shares))

    def longest_that_matters(self, objective: float) -> int:
        """Return the most layers of a stage in a plan below an objective in ticks, times v.

        A stage of time F is in a plan of (m·v − 1)·F + Σ F or more, and Σ F is no less than all
        layers at their fastest. Nor can it have more layers than fit in memory at their lightest.
        """
        count, stages = len(self.choices.layers), self.limits.stages
        weight = self.limits.microbatches * self.limits.stages_per_rank - 1
        fastest = self._least_before(lambda option, _: option.seconds * self.ticks_per_second)
        room = objective - fastest[-1] + 2 * count  # rounding
        most_ticks = room / weight if weight else np.inf
        lightest = self._least_before(lambda o, limit: limit.resident_bytes(o))
        most_bytes = max(stage.memory_bytes for stage in stages)
        within = min(_most_within(fastest, most_ticks), _most_within(lightest, most_bytes))
        return max(1, min(count - len(stages) + 1, within))

    def _least_before(self, amount: Callable[[LayerOption, StageLimit], float]) -> Floats:
        """Return the sums before each boundary of the least amounts of layers, on any stage."""
        least = [
            min(
                amount(option, limit)
                for limit in self._different_limits
                for option in self.choices.options[limit.device_class][c]
            )
            for c in range(len(self.choices.options[0]))
        ]
        return np.cumsum([0.0, *(least[c] for c in self.choices.layers)])

    def table(self, longest: int) -> IntervalTable:
        """Return the prices of all intervals of up to so many layers."""
        count = len(self.choices.layers)
        extras = [self._boundary_ticks(stage, longest) for stage in range(len(self._stage_mixes))]
        kinds, kind_of = self._kinds(np.min(extras, axis=0) < NEVER)
        priced = {mixes: mixes.times(kinds) for mixes in self._stage_mixes}
        richest = max(len(ticks) for ticks, _ in priced.values())
        shape = (richest, len(self._stage_mixes), count, longest)
        table = IntervalTable(ticks=np.full(shape, NEVER), steps=np.zeros(shape, np.int64))
        for stage, mixes in enumerate(self._stage_mixes):
            ticks, steps = priced[mixes]
            for mix in range(len(ticks)):
                own = np.append(ticks[mix], NEVER)[kind_of] + extras[stage]
                table.ticks[mix, stage] = np.minimum(own, NEVER)
                own_steps = np.append(steps[mix], 0)[kind_of]
                table.steps[mix, stage] = np.where(own < NEVER, own_steps, 0)
        return table

    def cut_scales(self, stage: int) -> tuple[float, float]:
        """Return the factors on the cuts before and after a stage."""
        stages = self.limits.stages
        after = stages[stage + 1].cut_scale if stage + 1 < len(stages) else 0.0
        return stages[stage].cut_scale, after

    def uses(self, interval: Interval) -> tuple[Counts, ...]:
        """Return for each class how many layers of an interval use each option."""
        counts = self._counts_before[interval.stop] - self._counts_before[interval.first]
        return self._stage_mixes[interval.stage].uses(tuple(counts.tolist()), interval.mix)

    def _mixes_of(self, stage: int, share: Share) -> StageMixes:
        limit = self.limits.stages[stage]
        key = (limit.device_class, limit.in_flight, limit.deferred, share)
        if key not in self._mixes:
            self._mixes[key] = StageMixes(
                self.choices.options[limit.device_class],
                share=share,
                limit=limit,
                ticks_per_second=self.ticks_per_second,
            )
        return self._mixes[key]

    def _kinds(self, is_legal: npt.NDArray[np.bool_]) -> tuple[Ticks, Ticks]:
        """Return the different counts of legal intervals, and which [first, length − 1] has which.

        Counts are told apart as numbers with a digit per class. What is not legal has no kind: −1.
        """
        before = self._counts_before
        digits = [1]
        for total in before[-1][:-1].tolist():
            digits.append(digits[-1] * (total + 1))
        if digits[-1] * (int(before[-1][-1]) + 1) >= NEVER:
            return self._kinds_of_their_own(is_legal)
        number = before @ np.array(digits)
        first, stop = self._intervals(is_legal.shape[1])
        difference = np.where(is_legal, number[stop] - number[first], -1)
        numbers, kind_of = np.unique(difference, return_inverse=True)
        kind_of = kind_of.reshape(difference.shape)
        if numbers[0] < 0:
            numbers, kind_of = numbers[1:], kind_of - 1
        kinds = numbers[:, None] // np.array(digits) % (before[-1] + 1)
        return kinds, kind_of

    def _kinds_of_their_own(self, is_legal: npt.NDArray[np.bool_]) -> tuple[Ticks, Ticks]:
        """Return every interval as a kind: with so many classes, few intervals are alike."""
        first, stop = self._intervals(is_legal.shape[1])
        kind_of = np.where(is_legal, np.cumsum(is_legal).reshape(is_legal.shape) - 1, -1)
        kinds = self._counts_before[stop[is_legal]] - self._counts_before[first[is_legal]]
        return kinds, kind_of

    def _intervals(self, longest: int) -> tuple[Ticks, Ticks]:
        """Return first and stop of each interval; stops are cut off at the end."""
        count = len(self.choices.layers)
        first, length = np.indices((count, longest))
        return first, np.minimum(first + length + 1, count)

    def _boundary_ticks(self, stage: int, longest: int) -> Ticks:
        """Return what an interval's boundaries and length add; for ever where they may not be."""
        first, stop = self._intervals(longest)
        is_real = first + np.arange(longest) < len(self.choices.layers)
        before, after = self.cut_scales(stage)
        boundaries = self.choices.boundaries
        begin = self._where_allowed(stage, [before * cut.beginning_seconds for cut in boundaries])
        end = self._where_allowed(stage + 1, [after * cut.ending_seconds for cut in boundaries])
        ticks = begin[first] + end[stop] + (stop - first) ** 2
        return np.where(is_real, np.minimum(ticks, NEVER), NEVER)

    def _where_allowed(self, boundary: int, seconds: list[float]) -> Ticks:
        """Return ticks by place, for ever where the boundary between two stages may not be."""
        earliest, latest = self.windows[boundary]
        return np.array(
            [
                round(amount * self.ticks_per_second)
                if cut.is_allowed and earliest <= place <= latest
                else NEVER
                for place, (amount, cut) in enumerate(
                    zip(seconds, self.choices.boundaries, strict=True)
                )
            ],
            dtype=np.int64,
        )


def _most_within(before: Floats, most: float) -> int:
    """Return the most layers in a row whose amounts do not sum to more."""
    stops = np.searchsorted(before, before + most, side="right") - 1
    return int((stops - np.arange(len(before))).max())


def _counts_before(choices: LayerChoices) -> Ticks:
    """Return how many layers of each class come before each boundary."""
    one_hot = np.eye(len(choices.options[0]), dtype=np.int64)[list(choices.layers)]
    return np.concatenate([np.zeros_like(one_hot[:1]), np.cumsum(one_hot, axis=0)])


def _ticks_per_second(choices: LayerChoices, limits: StageLimits) -> float:
    """Return the scale at which all layers and cuts, at their slowest, take so many ticks."""
    slowest = [
        max(o.seconds + o.step_seconds for table in choices.options for o in table[c])
        for c in range(len(choices.options[0]))
    ]
    scale = max(stage.cut_scale for stage in limits.stages)
    cuts = sum(cut.beginning_seconds + cut.ending_seconds for cut in choices.boundaries)
    total = sum(slowest[c] for c in choices.layers) + scale * cuts
    return _TICKS_OF_ALL_LAYERS / (total or 1.0)
