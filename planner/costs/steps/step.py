"""Combines stages, schedule, data parallelism and optimizer into the time of a step.

    step = first gather + pipeline(m microbatches) + last reduction + sum of tied weights' gradients
           + optimizer + framework (the host's work once per step) + a local step's share of an
           outer step

Stages are given in their order in the model; the schedule determines which rank runs which. If a
pipeline rank has unlike devices, its layers have the costs of the slowest (`slowest` in
plan/solving/costing.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.prediction import (
    Arrangement,
    LayerCost,
    Prediction,
    StagePrediction,
)
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.pipeline import PipelineSeconds, pipeline_seconds
from autopar.planner.costs.schedules.table import (
    in_flight,
    rank_moments,
    stage_ranks,
)
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.stage_load import (
    OuterSeconds,
    RankGroups,
    StageLoad,
    norm_seconds,
    rank_groups,
    summed_seconds,
)
from autopar.planner.costs.steps.stage_price import StagePrice, stage_price
from autopar.planner.costs.steps.terms import StepTerms, communication_terms, time_terms


def predict(
    stages: Sequence[Sequence[LayerCost]],
    arrangement: Arrangement,
    cluster: Cluster,
    *,
    constants: FrameworkConstants,
    model_flops: int,
    tied_gradient_bytes: int = 0,
) -> Prediction:
    """Return a step's prediction: seconds by term, communication, and each stage with its memory.

    `tied_gradient_bytes` are the gradients of weights that the first and the last stage share.
    `model_flops` are those of one step on all ranks.
    """
    groups = rank_groups(cluster, arrangement)
    prices = [
        stage_price(layers, stage, arrangement=arrangement, groups=groups, constants=constants)
        for stage, layers in enumerate(stages)
    ]
    step = step_of(
        prices, arrangement, groups, constants=constants, tied_gradient_bytes=tied_gradient_bytes
    )
    return Prediction(
        step_seconds=step.seconds,
        terms=time_terms(step, is_net_measured=_is_net_measured(cluster)),
        communication=communication_terms(step, _transfer_wait_seconds(step)),
        stages=_stage_predictions(step),
        outer_delay=step.outer_delay,
        model_flops=model_flops,
        peak_flops_per_second=groups.peak_flops_per_second,
    )


def step_of(
    prices: Sequence[StagePrice],
    arrangement: Arrangement,
    groups: RankGroups,
    *,
    constants: FrameworkConstants,
    tied_gradient_bytes: int = 0,
) -> StepTerms:
    """Return the terms of a step, from the prices of its stages."""
    shape = pipeline_shape(arrangement)
    ranks = stage_ranks(arrangement.schedule, shape)
    pipeline = pipeline_seconds(
        arrangement.schedule,
        shape,
        [price.seconds for price in prices],
        transfer_seconds=[price.transfer_seconds for price in prices[:-1]],
    )
    return StepTerms(
        arrangement=arrangement,
        groups=groups,
        constants=constants,
        prices=tuple(prices),
        pipeline_seconds=pipeline.step_seconds,
        first_gather_seconds=_first_gather_seconds(prices, ranks, pipeline),
        last_reduction_seconds=_last_reduction_seconds(prices, ranks, pipeline),
        tied_gradient_bytes=tied_gradient_bytes,
        tied_seconds=tied_seconds(groups, arrangement, tied_gradient_bytes),
        optimizer_seconds=_slowest([one.optimizer_seconds for one in prices], ranks)
        + norm_seconds(groups, arrangement),
        outer=OuterSeconds(
            computed=_slowest([one.outer.computed for one in prices], ranks),
            sent=_slowest([one.outer.sent for one in prices], ranks),
        ),
    )


def _transfer_wait_seconds(step: StepTerms) -> float:
    """Return how much longer the pipeline takes than if tensors arrived at once."""
    free = pipeline_seconds(
        step.arrangement.schedule,
        pipeline_shape(step.arrangement),
        [price.seconds for price in step.prices],
        transfer_seconds=[0.0] * (len(step.prices) - 1),
    )
    return max(0.0, step.pipeline_seconds - free.step_seconds)


def _is_net_measured(cluster: Cluster) -> bool:
    links = {unit.link for level in cluster.levels for unit in level.units}
    return all(link.collectives for link in links)


def pipeline_shape(arrangement: Arrangement) -> PipelineShape:
    """Return the ranks, stages and microbatches of an arrangement."""
    return PipelineShape(
        ranks=arrangement.pipeline,
        stages_per_rank=arrangement.stages_per_rank,
        microbatches=arrangement.microbatches,
    )


def tied_seconds(groups: RankGroups, arrangement: Arrangement, gradient_bytes: int) -> float:
    """Return the seconds to sum gradients of weights shared by the first and the last stage.

    If one rank holds both stages, as in a V of stages, it sends nothing.
    """
    ranks = stage_ranks(arrangement.schedule, pipeline_shape(arrangement))
    if ranks[0] == ranks[-1]:
        return 0.0
    return summed_seconds(groups.ends, gradient_bytes)


def _first_gather_seconds(
    prices: Sequence[StagePrice], ranks: Sequence[int], pipeline: PipelineSeconds
) -> float:
    """Return the seconds by which ZeRO's gathers delay the first forward.

    Later ranks gather while they wait for their input.
    """
    starts = pipeline.rank_starts_seconds
    return max(
        max(0.0, price.data.first_forward - starts[rank])
        for rank, price in zip(ranks, prices, strict=True)
    )


def _last_reduction_seconds(
    prices: Sequence[StagePrice], ranks: Sequence[int], pipeline: PipelineSeconds
) -> float:
    """Return by how much the slowest rank's reductions outlast the pipeline.

    A rank begins to reduce after its own last backward; ranks of the last stages begin first. The
    reductions include sums over the tensor axis: of the gradients of parameters that every tensor
    rank has whole, but uses for only its part of the sequence.
    """
    ends = list(pipeline.rank_ends_seconds)
    for rank, price in zip(ranks, prices, strict=True):
        ends[rank] += price.reduction_seconds
    return max(0.0, max(ends) - pipeline.step_seconds)


def _slowest(stages_seconds: Sequence[float], ranks: Sequence[int]) -> float:
    """Return the seconds of the slowest rank, from those of its stages.

    All ranks start the optimizer together, after the global norm, so the slowest ends the step.
    """
    seconds = [0.0] * (max(ranks) + 1)
    for rank, own in zip(ranks, stages_seconds, strict=True):
        seconds[rank] += own
    return max(seconds)


def _stage_predictions(step: StepTerms) -> tuple[StagePrediction, ...]:
    arrangement, shape = step.arrangement, pipeline_shape(step.arrangement)
    ranks = stage_ranks(arrangement.schedule, shape)
    loads: list[list[StageLoad]] = [[] for _ in range(arrangement.pipeline)]
    for rank, price in zip(ranks, step.prices, strict=True):
        loads[rank].append(price.load)
    memories = [
        memory_of(own, moments, arrangement, step.constants)
        for own, moments in zip(loads, rank_moments(arrangement.schedule, shape), strict=True)
    ]
    busy = [arrangement.microbatches * sum(load.seconds for load in own) for own in loads]
    held = in_flight(arrangement.schedule, shape)
    last = len(step.prices) - 1
    return tuple(
        StagePrediction(
            forward_seconds=price.load.forward_seconds,
            backward_seconds=price.load.backward_seconds + price.load.gradient_seconds,
            idle_seconds=max(0.0, step.seconds - busy[rank] - step.optimizer_seconds),
            in_flight=held[stage],
            memory=memories[rank],
            tensor_seconds=price.load.communication_seconds,
            action_seconds=price.seconds,
            transfer_seconds=price.transfer_seconds if stage < last else 0.0,
        )
        for stage, (rank, price) in enumerate(zip(ranks, step.prices, strict=True))
    )
