"""Turns a schedule and the seconds of actions and transfers into the start of each action.

All ranks are simulated together, row by row. In a row, each rank runs at most one action: the next
one of its order, if the actions it needs are in earlier rows. The rows follow from the schedule
alone, so they are found once. A simulation then adds up times row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.orders import ActionKind, Numbers, Schedule, columns_of
from autopar.planner.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class StageSeconds(NamedTuple):
    """The times of a stage for one microbatch, in the order of `ActionKind`.

    The full backward has its own time, because splitting it into halves is rarely free.
    """

    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float

    @property
    def split_seconds(self) -> float:
        """The additional time of a backward in two halves."""
        halves = self.input_gradient_seconds + self.weight_gradient_seconds
        return halves - self.backward_seconds


class Transfer(Enum):
    """Who waits while a tensor is sent from one stage to the next."""

    OVERLAPPED = "nobody: the receiving rank may compute other microbatches meanwhile"
    ON_DEMAND = "the receiver: it asks for the tensor when it has nothing else to do, and waits"


# One figure per action, shaped like the schedule.
Times = tuple[tuple[float, ...], ...]

_KINDS = len(ActionKind)
_FORWARD, _, _, _WEIGHTS = range(_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A schedule as a table: a column for each rank, a row for actions that run in parallel.

    Cells are numbered row by row. Row 0 is the beginning; a rank that waits in a row has an empty
    cell.
    """

    stages: int
    works: Numbers  # [row, rank]: 4 · stage + index of the kind in ActionKind; empty: 4 · stages
    needs: Numbers  # the cell that this one waits for; cell 0: none
    borders: Numbers  # s if its input passes between stages s and s + 1; else stages − 1

    def __post_init__(self) -> None:
        """Make the table read-only, because prepared schedules are cached."""
        for numbers in (self.works, self.needs, self.borders):
            numbers.flags.writeable = False

    @property
    def has_action(self) -> Flags:
        """Which cells are not empty."""
        found: Flags = self.works < _KINDS * self.stages
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """The start of each action of a schedule, and derived times."""

    order: Prepared
    starts: Floats  # [row, rank]
    ends: Floats

    @property
    def step_seconds(self) -> float:
        """When the last action ends."""
        return float(self.ends[-1].max())

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per rank: the step's time minus its compute time."""
        busy = np.where(self.order.has_action, self.ends - self.starts, 0.0).sum(axis=0)
        return tuple((self.step_seconds - busy).tolist())

    @property
    def starts_seconds(self) -> Times:
        """When each action begins."""
        return self._of_actions(self.starts)

    @property
    def ends_seconds(self) -> Times:
        """When each action ends."""
        return self._of_actions(self.ends)

    @property
    def rank_starts_seconds(self) -> tuple[float, ...]:
        """When each rank begins."""
        first = self.order.has_action.argmax(axis=0)
        return tuple(self.starts[first, range(len(first))].tolist())

    @property
    def rank_ends_seconds(self) -> tuple[float, ...]:
        """When each rank has finished."""
        return tuple(self.ends[-1].tolist())

    def _of_actions(self, cells: Floats) -> Times:
        has_action = self.order.has_action
        return tuple(
            tuple(own[there].tolist()) for own, there in zip(cells.T, has_action.T, strict=True)
        )


def prepared(schedule: Schedule) -> Prepared:
    """Return a schedule in the form that `simulate` needs."""
    firsts = np.array([0, *accumulate(map(len, schedule))])
    stage, kind, microbatch = columns_of([one for actions in schedule for one in actions])
    rank = np.repeat(np.arange(len(schedule)), np.diff(firsts))
    needs, borders = _needs(stage, kind, microbatch, rank)
    rows = _rows(needs, firsts, schedule)

    count, stages = len(schedule), int(stage.max()) + 1
    shape = int(rows.max()) + 1, count
    cells = np.append(rows * count + rank, 0)  # an action without inputs needs only the beginning
    works = np.full(shape, _KINDS * stages)
    needed = np.zeros(shape, dtype=np.int64)
    crossed = np.full(shape, stages - 1)
    works[rows, rank] = _KINDS * stage + kind
    needed[rows, rank] = cells[needs]
    crossed[rows, rank] = borders
    return Prepared(stages=stages, works=works, needs=needed, borders=crossed)


def _needs(
    stage: Numbers, kind: Numbers, microbatch: Numbers, rank: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the number of the action that each one waits for, and the border between them.

    Only actions of other stages are waited for. The stage's own forward, and the input gradient
    before its weight gradient, are earlier on the same rank in every valid schedule. Between stages
    of one rank, as at the turn of a V, no border is crossed.
    """
    count, stages = len(stage), int(stage.max()) + 1
    is_forward, gives = kind == _FORWARD, kind != _WEIGHTS
    # [is forward, stage + 1, microbatch]: the action that gives this tensor; `count`: none
    giver = np.full((2, stages + 2, int(microbatch.max()) + 1), count)
    giver[is_forward[gives].astype(int), stage[gives] + 1, microbatch[gives]] = np.flatnonzero(
        gives
    )
    source = np.where(is_forward, stage - 1, stage + 1)
    needs = np.where(gives, giver[is_forward.astype(int), source + 1, microbatch], count)
    is_crossed = (needs < count) & (np.append(rank, -1)[needs] != rank)
    return needs, np.where(is_crossed, np.minimum(source, stage), stages - 1)


def _rows(needs: Numbers, firsts: Numbers, schedule: Schedule) -> Numbers:
    """Return each action's row: the first after its input and the action before it on its rank."""
    rows = np.zeros(len(needs), dtype=np.int64)
    has_run = np.zeros(len(needs) + 1, dtype=np.bool_)
    has_run[-1] = True
    needs = np.append(needs, len(needs))
    at, stop, row = firsts[:-1].copy(), firsts[1:], 0
    while (left := at < stop).any():
        row += 1
        runs = at[left & has_run[needs[at]]]
        if not runs.size:
            waiting = [(rank, int(at[rank] - firsts[rank])) for rank in np.flatnonzero(left)]
            blocked = ", ".join(str(schedule[rank][number]) for rank, number in waiting)
            raise InputError(f"the pipeline schedule waits for ever at {blocked}")
        rows[runs] = row
        at[left & has_run[needs[at]]] += 1
        has_run[runs] = True
    return rows


def simulate(
    order: Prepared,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    transfer: Transfer,
) -> Simulation:
    """Return the start of each action if every rank runs its actions in order, as soon as possible.

    transfer_seconds[s] is the time between stages s and s + 1, one way; the gradient is as large as
    the activation. An action whose input is finished on another rank at `ready` starts at

        OVERLAPPED   max(own rank free, ready + transfer)
        ON_DEMAND    max(own rank free, ready) + transfer

    This does not count that transfers may share a link, nor that a sender may wait for its
    receiver. In 1F1B the latter costs nothing: at that moment the sender waits for a gradient from
    this receiver anyway. The schedule must be a valid one.
    """
    assert order.stages == len(stages) == len(transfer_seconds) + 1
    seconds = np.array([*stages, (0.0,) * _KINDS]).ravel()[order.works]
    delays = np.array([*transfer_seconds, 0.0])[order.borders]
    starts, ends = np.zeros_like(seconds), np.zeros_like(seconds)
    ready_at, free = ends.ravel(), ends[0]
    is_overlapped = transfer is Transfer.OVERLAPPED
    for needs, delay, taken, start, end in zip(
        order.needs[1:], delays[1:], seconds[1:], starts[1:], ends[1:], strict=True
    ):
        ready = ready_at[needs]
        if is_overlapped:
            ready += delay
            np.maximum(ready, free, out=start)
        else:
            np.maximum(ready, free, out=start)
            start += delay
        np.add(start, taken, out=end)
        free = end
    return Simulation(order=order, starts=starts, ends=ends)
