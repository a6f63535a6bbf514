"""Finds the critical path of a pipeline: the longest chain of actions that wait for each other.

Whatever the stages' seconds are, a schedule takes at least as long as any chain, and exactly as
long as the longest one. The number of times that a chain passes each action is fixed, so its length
is linear in the seconds of the stages:

    length  =  Σ_stages  f · forward + b · backward + i · input gradient + w · weight gradient
               + c · transfer to the next stage

The chain that is longest for some times of the stages gives a lower bound for any other times. A
rank begins to reduce gradients after its last backward, so the rank's reductions follow a chain
that ends there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from autopar.planner.costs.schedules.orders import ActionKind, Numbers, PipelineShape
from autopar.planner.costs.schedules.pipeline import is_simulated_whole, order_of
from autopar.planner.costs.schedules.simulation import (
    Flags,
    Floats,
    Prepared,
    Simulation,
    StageSeconds,
    simulate,
)
from autopar.planner.costs.schedules.table import SCHEDULES, ScheduleKind, in_flight, rank_of

KINDS = tuple(ActionKind)
TRANSFER = len(KINDS)  # the last column of the counts: transfers to the next stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """How often a chain passes each kind of action of each stage, and the rank where it ends.

    If `rank` is None, the chain goes on to the end of the schedule.
    """

    counts: Floats  # [stage, kind of action]; the last column: transfers
    rank: int | None = None

    def __post_init__(self) -> None:
        """Make the counts read-only, because chains are cached."""
        self.counts.flags.writeable = False

    @property
    def key(self) -> tuple[bytes, int | None]:
        """A key that is equal for equal chains."""
        return self.counts.tobytes(), self.rank


def times_of(stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]) -> Floats:
    """Return the seconds of stages and transfers in the order of a chain's counts."""
    times = np.zeros((len(stages), TRANSFER + 1))
    for row, stage in zip(times, stages, strict=True):
        row[:TRANSFER] = stage
    times[: len(transfer_seconds), TRANSFER] = transfer_seconds
    return times


class Chains:
    """The known chains of one schedule. A search adds the chains that it finds.

    Searches do not share chains: otherwise one search's result would depend on earlier ones.
    """

    def __init__(self, first: Iterable[Chain]) -> None:
        self._every: dict[object, Chain] = {}
        self._counts: Floats | None = None  # the counts of all chains, a row for each
        self._ends: Numbers = np.zeros(0, dtype=np.int64)  # the rank that each ends on, or -1
        self.add(first)

    def __iter__(self) -> Iterator[Chain]:
        return iter(tuple(self._every.values()))

    def add(self, chains: Iterable[Chain]) -> None:
        """Add chains that are not known yet."""
        for one in chains:
            if one.key not in self._every:
                self._every[one.key] = one
                self._counts = None

    def lengths(self, times: Floats, reductions: Floats | None = None) -> Floats:
        """Return the length of each chain; each is a lower bound of the schedule.

        With `reductions`, a chain that ends on a rank goes on with that rank's reductions.
        """
        if self._counts is None:
            every = self._every.values()
            self._counts = np.array([one.counts.ravel() for one in every])
            self._ends = np.array([-1 if one.rank is None else one.rank for one in every])
        found: Floats = self._counts @ times.ravel()
        return found if reductions is None else found + np.append(reductions, 0.0)[self._ends]


@lru_cache(maxsize=256)
def first_chains(kind: ScheduleKind, shape: PipelineShape) -> tuple[Chain, ...]:
    """Return chains that exist whatever the stages' seconds are: one or two for each rank.

    For GPipe and 1F1B see `_closed`. Other chains take a forward of each earlier rank, then all
    actions of their rank, and end there. If backwards are not split, there is a second chain for
    each rank: it goes on through a backward of each earlier rank.
    """
    if kind.has_closed_form:
        return tuple(_closed(kind, shape, stage) for stage in range(shape.stages))
    ranks = range(shape.ranks)
    whole = (
        [] if SCHEDULES[kind].splits_backward else [_through_rank(kind, shape, r) for r in ranks]
    )
    return (*whole, *(_to_end_of_rank(kind, shape, rank) for rank in ranks))


def longest_chains(
    kind: ScheduleKind,
    shape: PipelineShape,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    reduction_seconds: Sequence[float],
) -> tuple[Chain, ...]:
    """Return the chain that ends last, and the one that ends last if reductions follow.

    Returns no chain if the schedule is too long to be simulated whole.
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
    """Return a chain of GPipe or 1F1B by the closed forms; transfers are on demand.

    The chain has all actions of `stage`, and a forward and a backward of each earlier stage. While
    later stages run its first microbatch, `stage` runs forwards of others; while they run its last
    one, backwards of others. With a 1 in `waits` (forwards, backwards), the chain has the actions
    of the later stages instead of these.
    """
    counts = _empty(shape)
    counts[:stage, :2] = 1.0
    counts[stage, :2] = shape.microbatches
    if kind is ScheduleKind.GPIPE:
        counts[stage + 1 :, :2] = 1.0
    else:
        fillers = in_flight(kind, shape)[stage] - 1
        counts[stage + 1 :, :2] = sum(waits)
        counts[stage, :2] -= [fillers * one for one in waits]
    return Chain(counts=_received(counts))


def _received(counts: Floats) -> Floats:
    """Add transfers: a forward receives from the stage before, a backward from the next one."""
    counts[:-1, TRANSFER] = counts[1:, 0] + counts[:-1, 1]
    return counts


@lru_cache(maxsize=64)
def _one_f_one_b_chains(shape: PipelineShape) -> tuple[Chain, ...]:
    kind, chains = ScheduleKind.ONE_F_ONE_B, []
    for stage, held in enumerate(in_flight(kind, shape)):
        both = [(1, 1)] if shape.microbatches > held else []
        for waits in [(0, 0), (1, 0), (0, 1), *both]:
            chains.append(_closed(kind, shape, stage, waits))
    return tuple(chains)


def _longest_gpipe(shape: PipelineShape, times: Floats) -> Chain:
    """Return the chain of length Σ(f + b) + (m − 1) · (longest forward + longest backward)."""
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
    """Return the chain, and one that ends on the rank whose reductions end last.

    The second chain lacks a backward of each earlier rank, as if these followed without a wait.
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
    counts = _to_end_of_rank(kind, shape, rank).counts.copy()
    counts[:rank, 1] += 1.0
    counts[:rank, TRANSFER] += 1.0
    return Chain(counts=counts)


def _to_end_of_rank(kind: ScheduleKind, shape: PipelineShape, rank: int) -> Chain:
    counts = _empty(shape)
    counts[:rank, 0] = 1.0
    counts[:rank, TRANSFER] = 1.0
    splits = SCHEDULES[kind].splits_backward
    for stage in range(shape.stages):
        if rank_of(kind, stage, shape.ranks) == rank:
            counts[stage, 0] = shape.microbatches
            counts[stage, 2:TRANSFER] = shape.microbatches if splits else 0.0
            counts[stage, 1] = 0.0 if splits else shape.microbatches
    return Chain(counts=counts, rank=rank)


def _traced(
    kind: ScheduleKind,
    shape: PipelineShape,
    stages: Sequence[StageSeconds],
    transfer_seconds: Sequence[float],
    reduction_seconds: Sequence[float],
) -> Iterator[Chain]:
    """Yield the critical chains of a simulated schedule, traced back from their ends."""
    simulation = simulate(
        order_of(kind, shape),
        stages,
        transfer_seconds=transfer_seconds,
        transfer=SCHEDULES[kind].transfer,
    )
    waits = _waits(simulation, transfer_seconds)
    last = np.array(simulation.rank_ends_seconds)
    latest, rank = int(np.argmax(last)), int(np.argmax(last + reduction_seconds))
    counts = _back_from(latest, simulation.order, waits)
    yield Chain(counts=counts)
    if rank != latest:
        counts = _back_from(rank, simulation.order, waits)
    yield Chain(counts=counts, rank=rank)


def _waits(simulation: Simulation, transfer_seconds: Sequence[float]) -> Flags:
    """Return which actions wait for another rank, not for the action before them on their rank."""
    order, ends = simulation.order, simulation.ends
    delays = np.array([*transfer_seconds, 0.0])
    waits = np.zeros(ends.shape, dtype=np.bool_)
    waits[1:] = ends.ravel()[order.needs[1:]] + delays[order.borders[1:]] > ends[:-1]
    return waits.ravel()


def _back_from(rank: int, order: Prepared, waits: Flags) -> Floats:
    """Return how often the chain that ends with a rank's last action passes each action."""
    works, needs, borders = (one.ravel() for one in (order.works, order.needs, order.borders))
    ranks, passed, crossed = order.works.shape[1], [], []
    cell = len(works) - ranks + rank
    while cell >= ranks:
        passed.append(works[cell])
        if waits[cell]:
            crossed.append(borders[cell])
            cell = int(needs[cell])
        else:
            cell -= ranks
    counts = np.zeros((order.stages, TRANSFER + 1))
    of_works = np.bincount(passed, minlength=TRANSFER * (order.stages + 1))
    of_borders = np.bincount(np.array(crossed, dtype=np.int64), minlength=order.stages)
    counts[:, :TRANSFER] = of_works[: TRANSFER * order.stages].reshape(-1, TRANSFER)
    counts[:-1, TRANSFER] = of_borders[:-1]  # the last stage has no next one
    return counts
