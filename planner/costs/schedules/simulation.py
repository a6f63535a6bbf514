"""Turns a schedule and the seconds of its actions and transfers into when every action runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from autopar.planner.costs.schedules.actions import ActionKind, Schedule, stage_to_rank
from autopar.planner.errors import InputError


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


class Transfer(Enum):
    """Who pays while a tensor travels from one stage to the next."""

    OVERLAPPED = "nobody: the receiving rank may compute other microbatches meanwhile"
    ON_DEMAND = "the receiver: it asks for the tensor when it has nothing else to do, and waits"


# One figure per action, shaped like the schedule.
Times = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """When each action of a schedule runs, and what follows from that."""

    step_seconds: float
    idle_seconds: tuple[float, ...]  # per rank: the step without its computing
    starts_seconds: Times
    ends_seconds: Times


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
    """A schedule with its actions as numbers: of stage and kind together, and of the microbatch."""

    schedule: Schedule
    ranks: dict[int, int]  # of each stage
    microbatches: int
    steps: tuple[tuple[tuple[int, int], ...], ...]


_KINDS = tuple(ActionKind)
_PLACE_OF_KIND = {kind: place for place, kind in enumerate(_KINDS)}


def prepared(schedule: Schedule) -> Prepared:
    """Return a schedule as `simulate_prepared` wants it, to be simulated many times."""
    return Prepared(
        schedule=schedule,
        ranks=stage_to_rank(schedule),
        microbatches=1 + max(action.microbatch for actions in schedule for action in actions),
        steps=tuple(
            tuple(
                (len(_KINDS) * action.stage + _PLACE_OF_KIND[action.kind], action.microbatch)
                for action in actions
            )
            for actions in schedule
        ),
    )


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
    work = _work_of_stages(order, stages, transfer_seconds)
    starts, ends = _run(order, work, transfer)
    step_seconds = max(rank_ends[-1] for rank_ends in ends)
    return Simulation(
        step_seconds=step_seconds,
        idle_seconds=tuple(
            step_seconds - sum(work[number].seconds for number, _ in steps) for steps in order.steps
        ),
        starts_seconds=starts,
        ends_seconds=ends,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One kind of action of one stage; its ends for all microbatches are a row of a table."""

    seconds: float
    needs_row: int  # the row that it waits for
    gives_row: int
    transfer_seconds: float  # between the ranks of the two rows


def _require_shapes(
    order: Prepared, stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]
) -> None:
    scheduled = len(order.ranks)
    if scheduled != len(stages) or len(transfer_seconds) != len(stages) - 1:
        raise InputError(
            f"a schedule of {scheduled} stages with the seconds of {len(stages)} stages"
            f" and {len(transfer_seconds)} transfers",
            expected="one figure per stage, and one transfer between each two neighbours",
        )


def _work_of_stages(
    order: Prepared, stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]
) -> tuple[_Work, ...]:
    """Return per stage, kind by kind, what it takes.

    The rows are forwards, gradients, one that is always there, and one that nobody reads.

    Only what comes from another stage is waited for: the own forward, and the input gradient before
    its weight gradient, are earlier on the same rank in every valid schedule.
    """
    count = len(stages)
    always, nowhere = 2 * count, 2 * count + 1
    forward_rows = (always, *range(count - 1))
    gradient_rows = (*range(count + 1, 2 * count), always)
    delays = (0.0, *_delays_between_ranks(order, transfer_seconds), 0.0)

    def work(seconds: float, needs: int, gives: int, delay: float) -> _Work:
        return _Work(seconds=seconds, needs_row=needs, gives_row=gives, transfer_seconds=delay)

    table: list[_Work] = []
    for stage, own in enumerate(stages):
        before, after = forward_rows[stage], gradient_rows[stage]
        row, into, back = count + stage, delays[stage], delays[stage + 1]
        kinds = {
            ActionKind.FORWARD: work(own.forward_seconds, before, stage, into),
            ActionKind.BACKWARD: work(own.backward_seconds, after, row, back),
            ActionKind.INPUT_GRADIENT: work(own.input_gradient_seconds, after, row, back),
            ActionKind.WEIGHT_GRADIENT: work(own.weight_gradient_seconds, always, nowhere, 0.0),
        }
        table += [kinds[kind] for kind in _KINDS]
    return tuple(table)


def _delays_between_ranks(order: Prepared, transfer_seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the transfers with zero where both stages are on one rank, as at the turn of a V."""
    rank_of = order.ranks
    return tuple(
        seconds if rank_of[stage] != rank_of[stage + 1] else 0.0
        for stage, seconds in enumerate(transfer_seconds)
    )


def _run(order: Prepared, work: Sequence[_Work], transfer: Transfer) -> tuple[Times, Times]:
    """Return starts and ends: in turn each rank runs until an input of it is not there yet."""
    microbatches, stages = order.microbatches, len(order.ranks)
    rows: list[list[float | None]] = [[None] * microbatches for _ in range(2 * stages + 2)]
    rows[2 * stages] = [0.0] * microbatches  # what the first and the last stage need
    steps = order.steps
    starts: list[list[float]] = [[] for _ in steps]
    ends: list[list[float]] = [[] for _ in steps]
    unfinished = list(range(len(steps)))
    while unfinished:
        before = sum(map(len, ends))
        for rank in unfinished:
            _run_until_blocked(steps[rank], work, transfer, rows, starts[rank], ends[rank])
        if sum(map(len, ends)) == before:
            blocked = ", ".join(str(order.schedule[rank][len(ends[rank])]) for rank in unfinished)
            raise InputError(f"the pipeline schedule waits for ever at {blocked}")
        unfinished = [rank for rank in unfinished if len(ends[rank]) < len(steps[rank])]
    return tuple(map(tuple, starts)), tuple(map(tuple, ends))


def _run_until_blocked(
    steps: Sequence[tuple[int, int]],
    works: Sequence[_Work],
    transfer: Transfer,
    rows: list[list[float | None]],
    starts: list[float],
    ends: list[float],
) -> None:
    """Append the times of the rank's next actions, up to the first whose input is not there."""
    overlapped = transfer is Transfer.OVERLAPPED
    free = ends[-1] if ends else 0.0
    for index in range(len(ends), len(steps)):
        number, microbatch = steps[index]
        work = works[number]
        ready = rows[work.needs_row][microbatch]
        if ready is None:
            return
        if overlapped:
            start = max(free, ready + work.transfer_seconds)
        else:
            start = max(free, ready) + work.transfer_seconds
        free = start + work.seconds
        rows[work.gives_row][microbatch] = free
        starts.append(start)
        ends.append(free)
