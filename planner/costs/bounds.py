"""Bounds of a step's time and memory that hold before anything is solved; the search prunes.

They take totals over all layers and hold for every way to cut the layers into stages.
"""

from __future__ import annotations

from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.schedule import ScheduleKind


def least_step_seconds(layers_seconds: float, arrangement: Arrangement) -> float:
    """Return what no cut of the layers beats, given forward and backward of one microbatch.

    GPipe and 1F1B: stage s computes nothing before the first microbatch has passed the stages
    before it, nor after it has begun its way back through them, so T ≥ Σ_{j<s} t_j + m·t_s. Were
    all p of these equal, with Σ t = L:

        T = L ÷ (1 − (1 − 1/m)^p)

    and no other cut makes the greatest of them smaller. Other schedules: m·L ÷ p. Leaves out every
    communication, the optimizer and the framework.
    """
    microbatches, ranks = arrangement.microbatches, arrangement.pipeline
    if ranks == 1:
        return microbatches * layers_seconds
    if arrangement.schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B):
        return layers_seconds / (1.0 - (1.0 - 1.0 / microbatches) ** ranks)
    return max(layers_seconds, microbatches * layers_seconds / ranks)


def least_memory_bytes(
    *,
    parameter_bytes: int,
    gradient_bytes: int,
    optimizer_bytes: int,
    saved_bytes: int,
    arrangement: Arrangement,
) -> int:
    """Return what the fullest rank holds at least, given totals over all layers.

    An even share of the state, as far as ZeRO divides it, and of the activations of one microbatch,
    which every stage holds at its peak. Leaves out transients, buffers, margin and context.
    """
    shard, zero = arrangement.shard, arrangement.zero
    state = (
        (parameter_bytes if zero < Zero.PARAMETERS else 0)  # the optimizer's copies may be all
        + gradient_bytes / (shard if zero >= Zero.GRADIENTS else 1)
        + optimizer_bytes / (shard if zero >= Zero.OPTIMIZER else 1)
    )
    return int((state + saved_bytes) / arrangement.pipeline)
