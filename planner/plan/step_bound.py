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
from autopar.planner.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all layers on the ranks of one tensor group, each at its least."""

    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    trainable: int


def step_bound_seconds(
    totals: Totals,
    arrangement: Arrangement,
    cluster: Cluster,
    constants: FrameworkConstants,
    *,
    recompute_seconds: float,
) -> float:
    """Return what no choice of stages beats when layers recompute for at least so long."""
    groups = rank_groups(cluster, arrangement)
    stages = arrangement.pipeline * arrangement.stages_per_rank
    acting = 2 * stages * constants.action_seconds
    alone = totals.forward_seconds + totals.backward_seconds + recompute_seconds
    computing = least_step_seconds(alone + acting, arrangement)
    gathering = _gathering_seconds(totals, arrangement, groups)
    reducing = _reducing_seconds(totals, arrangement, groups)
    updating = _updating_seconds(totals, arrangement, groups, constants)
    return max(computing, gathering) + reducing + updating + constants.step_seconds


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
        )
        for rates in dict.fromkeys(groups.stage_rates)
    )
