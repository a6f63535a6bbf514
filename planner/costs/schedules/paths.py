"""Finds what decides how long a pipeline takes: its longest chain of actions in waiting.

Whatever the stages take, a schedule takes no less than any of its chains, and exactly as long as
the longest. How often a chain passes each action is fixed, so its length is linear in the seconds
of the stages:

    length  =  Σ_stages  f · forward + b · backward + i · input gradient + w · weight gradient
                       + c · transfer to the next stage

A chain that is the longest for some stages bounds every choice of stages from below. A reduction
begins when the last backward of its rank ends: a chain to there has this rank's reductions behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.actions import ActionKind
from autopar.planner.costs.schedules.pipeline import is_simulated_whole, order_of, rank_of
from autopar.planner.costs.schedules.simulation import (
    Prepared,
    StageSeconds,
    Transfer,
    simulate_prepared,
)
from autopar.planner.costs.schedules.table import SCHEDULES, PipelineShape, ScheduleKind

Floats = npt.NDArray[np.float64]
KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
TRANSFER = len(KINDS)  # the last column of the counts: transfers to the next stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """How often a chain passes each kind of action of each stage, and the rank where it ends.

    No rank: it goes on to the end of the schedule.
    """

    counts: Floats  # [stage, kind of action, then transfers]
    rank: int | None = None

    @property
    def key(self) -> tuple[bytes, int | None]:
        """What tells chains apart."""
        return self.counts.tobytes(), self.rank


def times_of(stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]) -> Floats:
    """Return the seconds of stages and transfers as chains count them."""
    times = np.zeros((len(stages), TRANSFER + 1))
    for row, stage in zip(times, stages, strict=True):
        row[:TRANSFER] = (
            stage.forward_seconds,
            stage.backward_seconds,
            stage.input_gradient_seconds,
            stage.weight_gradient_seconds,
        )
    times[: len(transfer_seconds), TRANSFER] = transfer_seconds
    return times


class Chains:
    """The chains of a schedule that are known: the first ones, and what was found since."""

    def __init__(self, first: Iterable[Chain]) -> None:
        self._every: dict[object, Chain] = {}
        self._counts: Floats | None = None  # of all of them, a row for each
        self.add(first)

    def __iter__(self) -> Iterator[Chain]:
        return iter(tuple(self._every.values()))

    def add(self, chains: Iterable[Chain]) -> None:
        """Add what is not known yet."""
        for one in chains:
            if one.key not in self._every:
                self._every[one.key] = one
                self._counts = None

    def lengths(self, times: Floats) -> Floats:
        """Return how long each of them is; none is longer than the schedule."""
        if self._counts is None:
            self._counts = np.array([one.counts.ravel() for one in self._every.values()])
        found: Floats = self._counts @ times.ravel()
        return found


@lru_cache(maxsize=256)
def chains_of(kind: ScheduleKind, shape: PipelineShape) -> Chains:
    """Return the chains of a schedule; those that are found later stay for who asks next."""
    return Chains(first_chains(kind, shape))


def first_chains(kind: ScheduleKind, shape: PipelineShape) -> tuple[Chain, ...]:
    """Return chains that hold whatever the stages take: through each rank in turn.

    A rank begins with its first forward, runs all its actions, and where backwards are not split,
    the last gradients still have to pass the ranks before it.
    """
    if kind.has_closed_form:
        return tuple(_closed(kind, shape, stage) for stage in range(shape.stages))
    return tuple(_through_rank(kind, shape, rank) for rank in range(shape.ranks))


def longest_chains(
    kind: ScheduleKind,
    shape: PipelineShape,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    reduction_seconds: Sequence[float],
) -> tuple[Chain, ...]:
    """Return the chain that ends last with the reductions of ranks, and the one without them.

    None where the schedule is too long to be simulated whole.
    """
    if kind is ScheduleKind.GPIPE:
        times = times_of(stages, transfer_seconds)
        return _with_ends(_longest_gpipe(shape, times), times, reduction_seconds)
    if kind is ScheduleKind.ONE_F_ONE_B:
        times = times_of(stages, transfer_seconds)
        best = max(_one_f_one_b_chains(shape), key=lambda one: float((one.counts * times).sum()))
        return _with_ends(best, times, reduction_seconds)
    if not is_simulated_whole(kind, shape):
        return ()
    return tuple(_traced(kind, shape, stages, transfer_seconds, reduction_seconds))


def _empty(shape: PipelineShape) -> Floats:
    return np.zeros((shape.stages, TRANSFER + 1))


def _closed(
    kind: ScheduleKind,
    shape: PipelineShape,
    stage: int,
    waits: tuple[int, int] = (0, 0),
) -> Chain:
    """Return a chain of GPipe or 1F1B, as the closed forms have it: transfers on demand.

    The slowest stage runs all its actions, all earlier ones pass one microbatch there and back.
    `waits` says for how many of its forwards, and of its backwards, it waits for the later stages
    (closed_forms.py).
    """
    counts = _empty(shape)
    counts[:stage, :2] = 1.0
    counts[stage, :2] = shape.microbatches
    if kind is ScheduleKind.GPIPE:
        counts[stage + 1 :, :2] = 1.0
    else:
        fillers = min(shape.microbatches, shape.stages - stage) - 1
        counts[stage + 1 :, :2] = sum(waits)
        counts[stage, :2] -= [fillers * one for one in waits]
    return Chain(counts=_received(counts))


def _received(counts: Floats) -> Floats:
    """Add the transfers of actions: a forward receives from before, a backward from behind."""
    counts[:-1, TRANSFER] = counts[1:, 0] + counts[:-1, 1]
    return counts


@lru_cache(maxsize=64)
def _one_f_one_b_chains(shape: PipelineShape) -> tuple[Chain, ...]:
    kind, chains = ScheduleKind.ONE_F_ONE_B, []
    for stage in range(shape.stages):
        fillers = min(shape.microbatches, shape.stages - stage) - 1
        both = [(1, 1)] if shape.microbatches > fillers + 1 else []
        for waits in [(0, 0), (1, 0), (0, 1), *both]:
            chains.append(_closed(kind, shape, stage, waits))
    return tuple(chains)


def _longest_gpipe(shape: PipelineShape, times: Floats) -> Chain:
    """Return Σ + (m − 1) · (longest forward + longest backward), which receive what they need."""
    received = times[:, :2].copy()
    received[1:, 0] += times[:-1, TRANSFER]
    received[:, 1] += times[:, TRANSFER]
    counts = _empty(shape)
    counts[:, :2] = 1.0
    for column in (0, 1):
        counts[int(np.argmax(received[:, column])), column] += shape.microbatches - 1
    return Chain(counts=_received(counts))


def _with_ends(
    chain: Chain, times: Floats, reduction_seconds: Sequence[float]
) -> tuple[Chain, ...]:
    """Return the chain, and the one to the rank whose reductions end last.

    A rank is done when the gradients still have to pass those before it.
    """
    backward = times[:, 1] + times[:, TRANSFER]
    passed = [0.0, *accumulate(backward[:-1])]
    ends = [one - later for one, later in zip(reduction_seconds, passed, strict=True)]
    rank = int(np.argmax(ends))
    counts = chain.counts.copy()
    counts[:rank, 1] -= 1.0
    counts[:rank, TRANSFER] -= 1.0
    return chain, Chain(counts=counts, rank=rank)


def _through_rank(kind: ScheduleKind, shape: PipelineShape, rank: int) -> Chain:
    counts = _empty(shape)
    counts[:rank, 0] = 1.0
    counts[:rank, TRANSFER] = 1.0
    splits = SCHEDULES[kind].splits_backward
    if not splits:
        counts[:rank, 1] += 1.0
        counts[:rank, TRANSFER] += 1.0
    for stage in range(shape.stages):
        if rank_of(kind, stage, shape.ranks) == rank:
            counts[stage, 0] = shape.microbatches
            counts[stage, 2:TRANSFER] = shape.microbatches if splits else 0.0
            counts[stage, 1] = 0.0 if splits else shape.microbatches
    return Chain(counts=counts)


def _traced(
    kind: ScheduleKind,
    shape: PipelineShape,
    stages: Sequence[StageSeconds],
    transfer_seconds: Sequence[float],
    reduction_seconds: Sequence[float],
) -> Iterator[Chain]:
    """Yield the chains that decide a simulated schedule, traced back from where they end."""
    order = order_of(kind, shape)
    simulation = simulate_prepared(
        order,
        stages,
        transfer_seconds=transfer_seconds,
        transfer=SCHEDULES[kind].transfer,
    )
    last = [ends[-1] for ends in simulation.ends_seconds]
    trace = _Trace(
        order=order,
        producers=_producers(order),
        starts=simulation.starts_seconds,
        ends=simulation.ends_seconds,
        transfers=tuple(transfer_seconds),
        transfer=SCHEDULES[kind].transfer,
    )
    yield Chain(counts=trace.back_from(int(np.argmax(last))))
    reduced = [end + more for end, more in zip(last, reduction_seconds, strict=True)]
    rank = int(np.argmax(reduced))
    yield Chain(counts=trace.back_from(rank), rank=rank)


_Place = tuple[int, int]  # a rank, and the number of an action in its order


@lru_cache(maxsize=64)
def _producers(order: Prepared) -> dict[tuple[int, bool, int], _Place]:
    """Return where each activation (True) and each gradient of a stage and microbatch is made."""
    made: dict[tuple[int, bool, int], _Place] = {}
    for rank, actions in enumerate(order.schedule):
        for number, action in enumerate(actions):
            if action.kind is not ActionKind.WEIGHT_GRADIENT:
                is_forward = action.kind is ActionKind.FORWARD
                made[action.stage, is_forward, action.microbatch] = rank, number
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trace:
    """A schedule that was simulated, to be followed backwards."""

    order: Prepared
    producers: dict[tuple[int, bool, int], _Place]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    transfers: tuple[float, ...]
    transfer: Transfer

    def back_from(self, rank: int) -> Floats:
        """Return how often the chain that ends with a rank's last action passes each action."""
        counts = np.zeros((len(self.order.ranks), TRANSFER + 1))
        place: _Place | None = (rank, len(self.ends[rank]) - 1)
        while place is not None:
            rank, number = place
            action = self.order.schedule[rank][number]
            counts[action.stage, KINDS.index(action.kind)] += 1.0
            place = self._before(rank, number, counts)
        return counts

    def _before(self, rank: int, number: int, counts: Floats) -> _Place | None:
        """Return the action that this one waited for longest; count the transfer in between."""
        action = self.order.schedule[rank][number]
        free = self.ends[rank][number - 1] if number else 0.0
        is_forward = action.kind is ActionKind.FORWARD
        source = action.stage - 1 if is_forward else action.stage + 1
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            source = -1
        made = self.producers.get((source, is_forward, action.microbatch))
        if made is None or made[0] == rank:  # what the own rank makes is there in its order
            return (rank, number - 1) if number else None
        border = min(source, action.stage)
        ready = self.ends[made[0]][made[1]]
        is_on_demand = self.transfer is Transfer.ON_DEMAND
        arrives = ready if is_on_demand else ready + self.transfers[border]
        waits = arrives > free
        if waits or is_on_demand:
            counts[border, TRANSFER] += 1.0
        if waits or not number:
            return made
        return rank, number - 1
