"""Turns a schedule and the seconds of its actions and transfers into when every action runs.

All ranks are simulated side by side. Row by row, each rank runs at most one action: the next of its
order, if what it needs has run in a row before. Which actions share a row follows from the schedule
alone, so it is found once; a simulation then adds up one row of all ranks after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from autopar.planner.costs.schedules.orders import ActionKind, Numbers, Schedule, columns_of
from autopar.planner.errors import InputError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What one stage computes for one microbatch.

    The full backward has its own figure since splitting it in two is rarely free.
    """

    forward_seconds: float
    backward_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float

    @property
    def split_seconds(self) -> float:
        """What the backward takes longer in two halves."""
        halves = self.input_gradient_seconds + self.weight_gradient_seconds
        return halves - self.backward_seconds

    @property
    def of_kinds(self) -> tuple[float, float, float, float]:
        """The seconds in the order of `ActionKind`."""
        return (
            self.forward_seconds,
            self.backward_seconds,
            self.input_gradient_seconds,
            self.weight_gradient_seconds,
        )


class Transfer(Enum):
    """Who pays while a tensor travels from one stage to the next."""

    OVERLAPPED = "nobody: the receiving rank may compute other microbatches meanwhile"
    ON_DEMAND = "the receiver: it asks for the tensor when it has nothing else to do, and waits"


# One figure per action, shaped like the schedule.
Times = tuple[tuple[float, ...], ...]

_KINDS = len(ActionKind)
_FORWARD, _, _, _WEIGHTS = range(_KINDS)


def even_stages(
    stages: int,
    *,
    forward_seconds: float,
    input_gradient_seconds: float,
    weight_gradient_seconds: float,
) -> tuple[StageSeconds, ...]:
    """Return equal stages whose full backward costs its two halves."""
    one = StageSeconds(
        forward_seconds=forward_seconds,
        backward_seconds=input_gradient_seconds + weight_gradient_seconds,
        input_gradient_seconds=input_gradient_seconds,
        weight_gradient_seconds=weight_gradient_seconds,
    )
    return (one,) * stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A schedule as a table: a column for each rank, a row for what runs side by side.

    Cells are numbered row by row. Row 0 is the beginning; a rank that waits in a row has an empty
    cell there.
    """

    stages: int
    works: Numbers  # [row, rank]: 4 · stage + place of the kind in ActionKind; empty: 4 · stages
    needs: Numbers  # the cell that this one waits for; cell 0: none
    borders: Numbers  # what it needs crosses the border behind this stage; none: stages − 1

    def __post_init__(self) -> None:
        """Let nobody write to the table: prepared schedules are remembered."""
        for numbers in (self.works, self.needs, self.borders):
            numbers.flags.writeable = False

    @property
    def has_action(self) -> Flags:
        """Which cells are not empty."""
        found: Flags = self.works < _KINDS * self.stages
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """When each action of a schedule runs, and what follows from that."""

    order: Prepared
    starts: Floats  # [row, rank]
    ends: Floats

    @property
    def step_seconds(self) -> float:
        """When the last action ends."""
        return float(self.ends[-1].max())

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Per rank: the step without its computing."""
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
        """When each rank is done."""
        return tuple(self.ends[-1].tolist())

    def _of_actions(self, cells: Floats) -> Times:
        has_action = self.order.has_action
        return tuple(
            tuple(own[there].tolist()) for own, there in zip(cells.T, has_action.T, strict=True)
        )


def prepared(schedule: Schedule) -> Prepared:
    """Return a schedule as `simulate_prepared` wants it, to be simulated many times."""
    firsts = np.array([0, *accumulate(map(len, schedule))])
    stage, kind, microbatch = columns_of([one for actions in schedule for one in actions])
    rank = np.repeat(np.arange(len(schedule)), np.diff(firsts))
    needs, borders = _needs(stage, kind, microbatch, rank)
    rows = _rows(needs, firsts, schedule)

    count, stages = len(schedule), int(stage.max()) + 1
    shape = int(rows.max()) + 1, count
    cells = np.append(rows * count + rank, 0)  # what needs nothing needs the beginning
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
    """Return the action that each one waits for, by its number, and the border in between.

    Only what comes from another stage is waited for: the own forward, and the input gradient before
    its weight gradient, are earlier on the same rank in every valid schedule. Between stages of one
    rank, as at the turn of a V, nothing crosses.
    """
    count, stages = len(stage), int(stage.max()) + 1
    is_forward, is_made = kind == _FORWARD, kind != _WEIGHTS
    made = np.full((2, stages + 2, int(microbatch.max()) + 1), count)
    made[is_forward[is_made].astype(int), stage[is_made] + 1, microbatch[is_made]] = np.flatnonzero(
        is_made
    )
    source = np.where(is_forward, stage - 1, stage + 1)
    needs = np.where(is_made, made[is_forward.astype(int), source + 1, microbatch], count)
    is_crossed = (needs < count) & (np.append(rank, -1)[needs] != rank)
    return needs, np.where(is_crossed, np.minimum(source, stage), stages - 1)


def _rows(needs: Numbers, firsts: Numbers, schedule: Schedule) -> Numbers:
    """Return the row of each action: the first one behind what it needs and its rank's last."""
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
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    transfer: Transfer,
) -> Simulation:
    """Return when each action of a schedule runs; see `simulate_prepared`."""
    return simulate_prepared(
        prepared(schedule), stages, transfer_seconds=transfer_seconds, transfer=transfer
    )


def simulate_prepared(
    order: Prepared,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    transfer: Transfer,
) -> Simulation:
    """Return when each action runs if every rank runs its own in order, each as soon as it can.

    transfer_seconds[s] is the time between stages s and s + 1, one way; the gradient is as large as
    the activation. An action that needs a tensor which another rank has at `ready` computes from

        OVERLAPPED   max(own rank free, ready + transfer)
        ON_DEMAND    max(own rank free, ready) + transfer

    Left out: transfers that share a link, and a sender that waits for its receiver (in 1F1B it
    waits for a gradient from that receiver at the same time). The schedule must be a valid one.
    """
    _require_shapes(order, stages, transfer_seconds)
    seconds = np.array([*(one.of_kinds for one in stages), (0.0,) * _KINDS]).ravel()[order.works]
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


def _require_shapes(
    order: Prepared, stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]
) -> None:
    scheduled = order.stages
    if scheduled != len(stages) or len(transfer_seconds) != len(stages) - 1:
        raise InputError(
            f"a schedule of {scheduled} stages with the seconds of {len(stages)} stages"
            f" and {len(transfer_seconds)} transfers",
            expected="one figure per stage, and one transfer between each two neighbours",
        )
