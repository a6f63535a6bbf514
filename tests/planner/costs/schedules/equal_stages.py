"""Simulated schedules; equal stages, and the step seconds of schedules on them, as published."""

from collections.abc import Sequence

from autopar.planner.costs.schedules import simulation
from autopar.planner.costs.schedules.orders import Schedule
from autopar.planner.costs.schedules.simulation import Simulation, StageSeconds, Transfer, prepared


def simulate(
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    *,
    transfer_seconds: Sequence[float],
    transfer: Transfer,
) -> Simulation:
    """Return when each action of a schedule runs."""
    return simulation.simulate(
        prepared(schedule), stages, transfer_seconds=transfer_seconds, transfer=transfer
    )


def even_stages(
    stages: int,
    *,
    forward_seconds: float,
    input_gradient_seconds: float,
    weight_gradient_seconds: float,
) -> tuple[StageSeconds, ...]:
    """Return equal stages whose full backward takes as long as its two halves."""
    one = StageSeconds(
        forward_seconds=forward_seconds,
        backward_seconds=input_gradient_seconds + weight_gradient_seconds,
        input_gradient_seconds=input_gradient_seconds,
        weight_gradient_seconds=weight_gradient_seconds,
    )
    return (one,) * stages


def gpipe_step_seconds(
    forward_seconds: float, backward_seconds: float, *, stages: int, microbatches: int
) -> float:
    """Return (m + p − 1)·(f + b): GPipe on equal stages, no transfers. Source: arXiv 1811.06965."""
    return (microbatches + stages - 1) * (forward_seconds + backward_seconds)


def interleaved_step_seconds(
    forward_seconds: float,
    backward_seconds: float,
    *,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
) -> float:
    """Return (m·v + p − 1)·(f + b) for v equal stages per rank, no transfers, p dividing m.

    Source: arXiv 2104.04473, section 2.2 (f and b are of one stage, a v-th of the rank's work).
    """
    turns = microbatches * stages_per_rank + ranks - 1
    return turns * (forward_seconds + backward_seconds)


def interleaved_zero_bubble_step_seconds(
    forward_seconds: float,
    input_gradient_seconds: float,
    weight_gradient_seconds: float,
    *,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
) -> float:
    """Return m·v·(f + i + w) + (p − 1)·(f + i − min(f, i, w)): equal stages, no transfers, p | m.

    Source: arXiv 2401.10241, table 2 (ZB-H1), for w ≤ min(f, i); beyond that found by simulation:
    weight gradients fill the gaps of a rank, but no gap is longer than the shortest action.
    """
    work = forward_seconds + input_gradient_seconds + weight_gradient_seconds
    filled = min(forward_seconds, input_gradient_seconds, weight_gradient_seconds)
    bubble = forward_seconds + input_gradient_seconds - filled
    return microbatches * stages_per_rank * work + (ranks - 1) * bubble
