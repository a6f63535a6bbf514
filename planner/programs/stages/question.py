"""The input for choosing stages: layers, their modes and costs, and the pipeline.

A *cut* says where each stage begins. A *content* is the classes of a stage's layers, in order.
Layers are of one class if they cost the same on every rank and may run in the same modes. So stages
with equal contents cost the same on ranks of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import le

import numpy as np

from autopar.planner.costs.prediction import Arrangement, LayerCost, Modes, Recompute
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.simulation import Floats
from autopar.planner.costs.schedules.table import Moments, in_flight, rank_moments, stage_ranks
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.stage_load import RankGroups
from autopar.planner.costs.steps.state import host_bytes
from autopar.planner.costs.steps.step import pipeline_shape

_ROUNDING = 1e-9
Cut = tuple[int, ...]  # the first layer of each stage, and the number of all layers
Content = tuple[int, ...]  # the classes of a stage's layers
# the place of a border between layers: (True, run) if it is inside a run of equal layers, else
# (False, border)
BorderPlace = tuple[bool, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedLayer:
    """A layer that must be on a given stage."""

    layer: int
    stage: int


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots, because of cached properties
class StageQuestion:
    """An arrangement, and a model's layers in given layouts, for which stages are to be chosen."""

    arrangement: Arrangement
    groups: RankGroups
    constants: FrameworkConstants
    rows: tuple[tuple[Modes, ...], ...]  # the costs of all layers on each pipeline rank
    allowed: tuple[frozenset[Recompute], ...]  # allowed modes of each layer
    is_cuttable: tuple[bool, ...]  # whether a stage may end with each layer
    pins: tuple[PinnedLayer, ...]
    limit_bytes: tuple[int, ...]  # of each pipeline rank
    tied_gradient_bytes: int  # of weights that the first and the last layer share
    bucket_bytes: tuple[int, ...]  # sizes to choose from

    @cached_property
    def shape(self) -> PipelineShape:
        """The shape of the pipeline."""
        return pipeline_shape(self.arrangement)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return stage_ranks(self.arrangement.schedule, self.shape)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in their order in the model."""
        return tuple(
            tuple(stage for stage, own in enumerate(self.ranks) if own == rank)
            for rank in range(self.shape.ranks)
        )

    @cached_property
    def moments(self) -> tuple[Moments, ...]:
        """The microbatches that each rank holds at each moment of its order."""
        return rank_moments(self.arrangement.schedule, self.shape)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of rank of each stage; layers cost the same on ranks of one kind.

        A kind is the number of its first rank.
        """
        known: dict[int, int] = {}
        return tuple(known.setdefault(id(self.rows[rank]), rank) for rank in self.ranks)

    @cached_property
    def classes(self) -> tuple[int, ...]:
        """The class of each layer."""
        known: dict[object, int] = {}
        different = {id(row): row for row in self.rows}.values()
        return tuple(
            known.setdefault((*(id(row[place]) for row in different), modes), len(known))
            for place, modes in enumerate(self.allowed)
        )

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """A layer of each class."""
        return tuple(self.classes.index(number) for number in range(max(self.classes) + 1))

    def layer(self, kind: int, number: int) -> Modes:
        """Return the costs of a class on a kind of rank."""
        return self.rows[kind][self.examples[number]]

    def modes_of(self, kind: int, number: int) -> tuple[Recompute, ...]:
        """Return the modes of a class, the simplest first, without those that another beats."""
        example = self.examples[number]
        known: dict[_Amounts, Recompute] = {}
        for mode, cost in self.rows[kind][example].items():
            if mode in self.allowed[example]:
                known.setdefault(_amounts(cost), mode)
        return tuple(
            mode
            for own, mode in known.items()
            if not any(other != own and all(map(le, other, own)) for other in known)
        )

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The first and the last layer with which each stage may begin.

        The last entry is the end of the last stage: the number of layers, twice. No stage is empty,
        and a pin l → s means that s starts at l or before, and s + 1 after l.
        If a window is empty, the pins contradict each other.
        """
        count, stages = len(self.classes), self.shape.stages
        first, last = [0] * (stages + 1), [count] * (stages + 1)
        last[0], first[stages] = 0, count
        for pin in self.pins:
            if pin.stage >= stages:
                return ((0, -1),) * (stages + 1)
            last[pin.stage] = min(last[pin.stage], pin.layer)
            first[pin.stage + 1] = max(first[pin.stage + 1], pin.layer + 1)
        first = list(accumulate(first, lambda before, own: max(before + 1, own)))
        last = list(accumulate(reversed(last), lambda after, own: min(after - 1, own)))[::-1]
        return tuple(zip(first, last, strict=True))

    @cached_property
    def is_border(self) -> tuple[bool, ...]:
        """Whether a stage may begin or end at each border, the ends of the model included."""
        return (True, *self.is_cuttable[:-1], True)

    @property
    def host_link_bytes_per_second(self) -> float:
        """The rate at which saved tensors come back from the host."""
        return self.groups.host.bytes_per_second * self.constants.host_link_share

    def waits_for_host(self, stage: int) -> bool:
        """Whether a backward of a stage waits for the tensors of its last layer on the host."""
        return stage != self.shape.stages - 1

    @property
    def merges_runs(self) -> bool:
        """Whether all borders inside a run of equal layers count as one place.

        With pins they cannot. With one stage per rank this is not needed, because shortest paths
        have excluded most intervals.
        """
        return self.shape.stages_per_rank > 1 and not self.pins

    @cached_property
    def run_numbers(self) -> tuple[int, ...]:
        """The number of each layer's run: equal layers in a row, between which stages may meet."""
        numbers, run = [], -1
        for place, own in enumerate(self.classes):
            if place == 0 or own != self.classes[place - 1] or not self.is_border[place]:
                run += 1
            numbers.append(run)
        return tuple(numbers)

    @cached_property
    def places(self) -> tuple[BorderPlace, ...]:
        """The place of each border between layers, the ends included."""
        inside = (False, *(one == other for one, other in pairwise(self.run_numbers)), False)
        return tuple(
            (True, self.run_numbers[border]) if is_inside and self.merges_runs else (False, border)
            for border, is_inside in enumerate(inside)
        )

    def different_intervals(self, longest: int) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, first, stop) of possible stages; of equal ones in a run, only one."""
        alike: dict[object, list[tuple[int, int]]] = {}
        for first, stop in self._everywhere(longest):
            key = self.places[first], self.places[stop], self.classes[first:stop]
            alike.setdefault(key, []).append((first, stop))
        for stage in range(self.shape.stages):
            (begin, until), (end, last) = self.windows[stage], self.windows[stage + 1]
            for same in alike.values():
                for first, stop in same:
                    if begin <= first <= until and end <= stop <= last:
                        yield stage, first, stop
                        break

    def _everywhere(self, longest: int) -> Iterator[tuple[int, int]]:
        count = len(self.classes)
        for first in range(count):
            if self.is_border[first]:
                for stop in range(first + 1, min(count, first + longest) + 1):
                    if self.is_border[stop]:
                        yield first, stop

    def intervals(self, stage: int, longest: int) -> Iterator[tuple[int, int]]:
        """Yield first and stop of the intervals of at most `longest` layers that may be a stage."""
        (begin, until), (end, last) = self.windows[stage], self.windows[stage + 1]
        for first in range(begin, until + 1):
            if self.is_border[first]:
                for stop in range(max(end, first + 1), min(last, first + longest) + 1):
                    if self.is_border[stop]:
                        yield first, stop


def within_host(
    allowed: tuple[frozenset[Recompute], ...],
    rows: Sequence[Modes],
    arrangement: Arrangement,
    limit_bytes: int,
) -> tuple[frozenset[Recompute], ...]:
    """Return the modes of layers without those for which the host's memory is too small.

    While the largest needs of all layers together exceed that memory, a mode is removed from every
    layer that has another one; first the mode that saves most there. Stages count as equally large.
    """
    held = sum(host_bytes(modes[Recompute.NONE], arrangement) for modes in rows)
    flying = max(in_flight(arrangement.schedule, pipeline_shape(arrangement)))
    for mode in (None, *(one for one in Recompute if one.is_on_host)):
        allowed = tuple((own - {mode}) or own for own in allowed)
        sizes = [
            max((modes[one].host_saved_bytes for one in own if one.is_on_host), default=0)
            for own, modes in zip(allowed, rows, strict=True)
        ]
        staying = next(filter(None, reversed(sizes)), 0)  # the last such layer saves on the device
        if held + sum(sizes) * flying - staying <= limit_bytes * arrangement.pipeline:
            break
    return allowed


_Amounts = tuple[float, int, int, int, int, bool]


def _amounts(cost: LayerCost) -> _Amounts:
    """Return all that a mode changes; less of each is better."""
    return (
        *(cost.backward_seconds, cost.saved_bytes, cost.transient_bytes, cost.learning_bytes),
        *(cost.host_saved_bytes, cost.recompute_seconds > 0),
    )


def least_seconds(question: StageQuestion) -> Floats:
    """Return the least time of each layer, over modes and ranks."""
    kinds = dict.fromkeys(question.kinds)
    least = [
        min(
            cost.forward_seconds + cost.backward_seconds
            for kind in kinds
            for cost in question.layer(kind, number).values()
        )
        for number in range(len(question.examples))
    ]
    return np.array([least[number] for number in question.classes])


def even_cut(question: StageQuestion) -> Cut:
    """Return the cut with the least Σ (seconds of a stage)², at allowed borders; () if none exists.

    If a cut of k stages has a sum of at most Q, no stage differs from the mean μ of the stages by
    more than d, because the sum of the others' squares is least if these are all equal:

        d²  =  (Q − k · μ²) · (k − 1) ÷ k
    """
    count, stages = len(question.classes), question.shape.stages
    sums = np.concatenate([[0.0], np.cumsum(least_seconds(question))])
    mean = float(sums[-1]) / stages
    near = nearest_cut(
        question, np.interp(mean * np.arange(1, stages), sums, np.arange(count + 1)).tolist()
    )
    value = float((np.diff(sums[list(near)]) ** 2).sum()) if near else np.inf
    most = mean + np.sqrt(max(0.0, value - stages * mean**2) * (stages - 1) / stages)
    ends = np.searchsorted(sums, sums + most * (1.0 + _ROUNDING), side="right")
    longest = int((ends - np.arange(count + 1)).max())
    least = np.where(np.arange(count + 1) == 0, 0.0, np.inf)
    befores = []
    for first, last in question.windows[1:]:
        best, before = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=np.int64)
        places = np.flatnonzero(question.is_border[first : last + 1]) + first
        for length in range(1, min(longest, count - stages + 1) + 1):
            to = places[places >= length]
            total = least[to - length] + (sums[to] - sums[to - length]) ** 2
            is_less = total < best[to]
            best[to[is_less]] = total[is_less]
            before[to[is_less]] = to[is_less] - length
        least = best
        befores.append(before)
    if least[count] == np.inf:
        return ()
    cut = [count]
    for before in reversed(befores):
        cut.append(int(before[cut[-1]]))
    return tuple(reversed(cut))


def nearest_cut(question: StageQuestion, borders: Sequence[float]) -> Cut:
    """Return a cut: in turn, the allowed border nearest to each given one; () if none is left."""
    cut = [0]
    for stage, wanted in enumerate(borders, start=1):
        first, last = question.windows[stage]
        places = [
            place for place in range(max(first, cut[-1] + 1), last + 1) if question.is_border[place]
        ]
        if not places:
            return ()
        cut.append(min(places, key=lambda place: abs(place - wanted)))
    return (*cut, len(question.classes))


def moved_cuts(question: StageQuestion, cut: Cut, *, most_apart: int = 1) -> Iterator[Cut]:
    """Yield the cuts with one layer more in a stage and one less in another, a few stages apart.

    All borders between the two stages move by one layer.
    """
    stages = len(cut) - 1
    for first in range(1, stages):
        for last in range(first, min(stages, first + most_apart)):
            for step in (-1, 1):
                moved = [place + step for place in cut[first : last + 1]]
                is_between = cut[first - 1] < moved[0] and moved[-1] < cut[last + 1]
                windows = question.windows[first : last + 1]
                if is_between and all(
                    low <= place <= high and question.is_border[place]
                    for place, (low, high) in zip(moved, windows, strict=True)
                ):
                    yield (*cut[:first], *moved, *cut[last + 1 :])
