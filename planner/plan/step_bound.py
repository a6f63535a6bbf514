"""Bounds the step of an arrangement from below, before its stages are chosen.

Whatever the cut of the layers, some rank has at least the mean share of the computing, of the
parameters to gather, of the state to update: what those take at least bounds the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.bounds import least_step_seconds
from autopar.planner.costs.collective_choice import Collective
from autopar.planner.costs.data_parallel import priced
from autopar.planner.costs.framework import FrameworkConstants
from autopar.planner.costs.optimizer import optimizer_seconds
from autopar.planner.costs.prediction import Arrangement, Zero
from autopar.planner.costs.rank_groups import RankGroups, rank_groups
from autopar.planner.costs.schedule import ScheduleKind
from autopar.planner.plan.relaxed_memory import Block
from autopar.planner.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all layers on the ranks of one tensor group, each at its least."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    trainable: int


_IN_TURN = frozenset({ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B})


def step_bound_seconds(
    totals: Totals,
    arrangement: Arrangement,
    cluster: Cluster,
    constants: FrameworkConstants,
    *,
    recompute_seconds: float,
    bottleneck_seconds: float,
    repeated: Block,
) -> float:
    """Return what no choice of stages beats, given what recomputing and the slowest rank take.

    Whatever the schedule, the slowest rank is busy for m · T; without interleaving the others'
    share of the first microbatch comes before it or after it: (m − 1) · T + Σ. With it, the ranks
    are busy for m · Σ ÷ p on average, and wait on average as long as the mean of their waits.
    """
    groups = rank_groups(cluster, arrangement)
    stages = arrangement.pipeline * arrangement.stages_per_rank
    acting = 2 * stages * constants.action_seconds
    alone = totals.forward_seconds + totals.backward_seconds + recompute_seconds
    computing = max(
        least_step_seconds(alone + acting, arrangement),
        arrangement.microbatches * bottleneck_seconds,
    )
    microbatches, ranks = arrangement.microbatches, arrangement.pipeline
    if arrangement.schedule in _IN_TURN:
        computing = max(computing, (microbatches - 1) * bottleneck_seconds + alone)
    else:
        busy = microbatches * (alone + acting) / ranks
        computing = max(computing, busy + _mean_wait_seconds(arrangement, repeated))
    gathering = _gathering_seconds(totals, arrangement, groups)
    reducing = _reducing_seconds(totals, arrangement, groups)
    updating = _updating_seconds(totals, arrangement, groups, constants)
    return max(computing, gathering) + reducing + updating + constants.step_seconds


def _mean_wait_seconds(arrangement: Arrangement, repeated: Block) -> float:
    """Return how long the mean rank waits for the first microbatch, and for the last to go back.

    Rank r waits for r stages of one layer or more. Those that hold none of the repeated layers
    count for nothing. A zero-bubble schedule has weight gradients to compute on the way back.
    """
    each = repeated.forward_seconds
    if arrangement.schedule is ScheduleKind.INTERLEAVED_1F1B:
        each += repeated.backward_seconds
    stages = sum(max(0, rank - repeated.others) for rank in range(arrangement.pipeline))
    return each * stages / arrangement.pipeline


def _gathering_seconds(totals: Totals, arrangement: Arrangement, groups: RankGroups) -> float:
    """ZeRO-3: m · (max(forward, gather) + max(backward, gather)) of the mean rank.

    Σ_r max(f_r, g_r) is at least max(Σ f, Σ g), so the greatest rank has a p-th of that.
    """
    if arrangement.zero is not Zero.PARAMETERS:
        return 0.0
    gather = priced(Collective.ALL_GATHER, totals.parameter_bytes, groups.shard)
    both = max(totals.forward_seconds, gather) + max(totals.backward_seconds, gather)
    return arrangement.microbatches * both / arrangement.pipeline


def _reducing_seconds(totals: Totals, arrangement: Arrangement, groups: RankGroups) -> float:
    """Return what reducing takes beyond the whole last backward, which alone can hide it."""
    if arrangement.data == 1 or arrangement.zero is Zero.PARAMETERS or arrangement.pipeline > 1:
        return 0.0
    share = 0.5 if arrangement.compressed_gradients else 1.0
    sent = totals.gradient_bytes * share
    if arrangement.zero is Zero.NONE:
        seconds = priced(Collective.ALL_REDUCE, sent, groups.data)
    else:
        seconds = priced(Collective.REDUCE_SCATTER, sent, groups.shard)
    return max(0.0, seconds - totals.backward_seconds)


def _updating_seconds(
    totals: Totals, arrangement: Arrangement, groups: RankGroups, constants: FrameworkConstants
) -> float:
    share = arrangement.shard if arrangement.zero is not Zero.NONE else 1
    return min(
        optimizer_seconds(
            totals.trainable / (arrangement.pipeline * share),
            gradient_bytes=4,
            copy_bytes=0 if arrangement.precision is Precision.FP32 else 2,
            passes=constants.optimizer_passes,
            rates=rates,
            element_seconds=constants.optimizer_element_seconds,
        )
        for rates in dict.fromkeys(groups.stage_rates)
    )
