"""Puts layers, schedule, data parallelism and optimizer together into what one step takes.

    step = first gather + pipeline(m microbatches) + last reduction + sums over the tensor axis
         + optimizer + framework

Stages are given in their order in the model; the schedule says which rank runs which. Each stage's
layers are priced for the slowest of its rank's devices (costs/layers/slowest.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.planner.cluster.cluster import Cluster
from autopar.planner.costs.prediction import (
    Arrangement,
    LayerCost,
    Prediction,
    StagePrediction,
    Zero,
)
from autopar.planner.costs.schedules.moments import rank_moments
from autopar.planner.costs.schedules.pipeline import PipelineSeconds, pipeline_seconds, rank_of
from autopar.planner.costs.schedules.table import SCHEDULES, PipelineShape, in_flight_microbatches
from autopar.planner.costs.steps.data_parallel import DataGroups, DataSeconds, data_seconds
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.optimizer import optimizer_seconds
from autopar.planner.costs.steps.rank_groups import (
    RankGroups,
    norm_seconds,
    rank_groups,
    summed_seconds,
)
from autopar.planner.costs.steps.stage_load import StageLoad, stage_load
from autopar.planner.costs.steps.terms import Step, communication_terms, time_terms
from autopar.planner.precision import copy_bytes


def predict(
    stages: Sequence[Sequence[LayerCost]],
    arrangement: Arrangement,
    cluster: Cluster,
    *,
    constants: FrameworkConstants,
    model_flops: int,
    tied_gradient_bytes: int = 0,
) -> Prediction:
    """Return what one step takes: seconds by term, communication, and each stage with its memory.

    `tied_gradient_bytes` are of weights that the first and the last stage share. `model_flops` are
    of one step on all ranks.
    """
    groups = rank_groups(cluster, arrangement)
    loads = tuple(stage_load(layers) for layers in stages)
    data = tuple(
        data_seconds(
            load.layers,
            _data_groups(groups, arrangement, constants, rank=_rank(stage, arrangement)),
            microbatches=arrangement.microbatches,
        )
        for stage, load in enumerate(loads)
    )
    shape = pipeline_shape(arrangement)
    action_seconds = constants.action_on(arrangement)
    splits = arrangement.pipeline > 1 and SCHEDULES[arrangement.schedule].splits_backward
    scheduled = tuple(
        load.stage_seconds(
            forward_more=one.forward_wait,
            backward_more=one.backward_wait,
            action_seconds=action_seconds,
            splits=splits and stage > 0,  # the first one has weights alone to make gradients for
        )
        for stage, (load, one) in enumerate(zip(loads, data, strict=True))
    )
    transfers = [
        groups.transfer_seconds(load.output_bytes) if arrangement.pipeline > 1 else 0.0
        for load in loads[:-1]
    ]
    pipeline = pipeline_seconds(
        arrangement.schedule,
        shape,
        scheduled,
        transfer_seconds=transfers,
    )
    step = Step(
        arrangement=arrangement,
        loads=loads,
        data=data,
        pipeline_seconds=pipeline.step_seconds,
        transfer_seconds=tuple(transfers),
        first_gather_seconds=_first_gather_seconds(data, pipeline, arrangement),
        last_reduction_seconds=_last_reduction_seconds(loads, data, pipeline, groups, arrangement),
        tied_seconds=summed_seconds(groups.ends, tied_gradient_bytes * _sent_share(arrangement))
        if arrangement.pipeline > 1
        else 0.0,
        optimizer_seconds=_optimizer_seconds(loads, groups, arrangement, constants)
        + norm_seconds(groups, arrangement),
        framework_step_seconds=constants.step_seconds,
        framework_action_seconds=action_seconds,
        splitting_seconds=tuple(one.split_seconds for one in scheduled),
        is_host_measured=constants.is_measured,
        is_net_measured=_is_net_measured(cluster),
    )
    return Prediction(
        step_seconds=step.seconds,
        terms=time_terms(step),
        communication=communication_terms(step, groups, tied_gradient_bytes=tied_gradient_bytes),
        stages=_stage_predictions(step, shape, constants),
        model_flops=model_flops,
        peak_flops_per_second=groups.peak_flops_per_second,
    )


def _is_net_measured(cluster: Cluster) -> bool:
    links = {unit.link for level in cluster.levels for unit in level.units}
    return all(link.collectives for link in links)


def pipeline_shape(arrangement: Arrangement) -> PipelineShape:
    """Return what the schedule needs to know of an arrangement."""
    return PipelineShape(
        ranks=arrangement.pipeline,
        stages_per_rank=arrangement.stages_per_rank,
        microbatches=arrangement.microbatches,
    )


def _sent_share(arrangement: Arrangement) -> float:
    """Return how much of a gradient's bytes travels: LayerCost counts fp32."""
    return 0.5 if arrangement.compressed_gradients else 1.0


def _data_groups(
    groups: RankGroups, arrangement: Arrangement, constants: FrameworkConstants, *, rank: int
) -> DataGroups:
    return DataGroups(
        data=groups.data,
        shard=groups.shard if arrangement.zero is not Zero.NONE else groups.data,
        replicas=groups.replicas,
        zero=arrangement.zero,
        bucket_bytes=arrangement.bucket_bytes,
        gradient_share=_sent_share(arrangement),
        slowdown=constants.overlap_slowdown,
        unit=constants.unit_on(groups.slowest_rates(rank)),
        gathers_ahead=constants.gathers_ahead,
    )


def _first_gather_seconds(
    data: Sequence[DataSeconds], pipeline: PipelineSeconds, arrangement: Arrangement
) -> float:
    """Return what gathering adds before the first forward; a later rank gathers while it waits."""
    return max(
        max(0.0, one.first_forward - pipeline.rank_starts_seconds[_rank(stage, arrangement)])
        for stage, one in enumerate(data)
    )


def _rank(stage: int, arrangement: Arrangement) -> int:
    return rank_of(arrangement.schedule, stage, arrangement.pipeline)


def _last_reduction_seconds(
    loads: Sequence[StageLoad],
    data: Sequence[DataSeconds],
    pipeline: PipelineSeconds,
    groups: RankGroups,
    arrangement: Arrangement,
) -> float:
    """Return by how much the slowest rank's reductions outlast the pipeline.

    A rank begins when its own last backward ends; those of the last stages end first. Parameters
    that are whole on the tensor axis, but saw only a part of the sequence, are summed over it.
    """
    ends = list(pipeline.rank_ends_seconds)
    for stage, (load, one) in enumerate(zip(loads, data, strict=True)):
        replicated = summed_seconds(groups.tensor, load.replicated_gradient_bytes)
        ends[_rank(stage, arrangement)] += one.last_backward + replicated
    return max(0.0, max(ends) - pipeline.step_seconds)


def _optimizer_seconds(
    loads: Sequence[StageLoad],
    groups: RankGroups,
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> float:
    """Return the slowest rank's optimizer; all wait for it, since the norm is that of all."""
    parameters = [0.0] * arrangement.pipeline
    tensors = [0] * arrangement.pipeline
    for stage, load in enumerate(loads):
        parameters[_rank(stage, arrangement)] += load.trainable
        tensors[_rank(stage, arrangement)] += load.trainable_tensors
    share = arrangement.shard if arrangement.zero is not Zero.NONE else 1
    return max(
        optimizer_seconds(
            count / share,
            gradient_bytes=4,
            copy_bytes=copy_bytes(arrangement.precision),
            passes=constants.optimizer_passes,
            rates=rates,
            element_seconds=constants.optimizer_element_seconds,
        )
        + held * constants.optimizer_tensor_seconds
        for count, held, own in zip(parameters, tensors, groups.stage_rates, strict=True)
        for rates in own
    )


def _stage_predictions(
    step: Step, shape: PipelineShape, constants: FrameworkConstants
) -> tuple[StagePrediction, ...]:
    arrangement, loads = step.arrangement, step.loads
    own = [
        [load for stage, load in enumerate(loads) if _rank(stage, arrangement) == rank]
        for rank in range(arrangement.pipeline)
    ]
    memories = [
        memory_of(held, moments, arrangement, constants)
        for held, moments in zip(own, rank_moments(arrangement.schedule, shape), strict=True)
    ]
    busy = [arrangement.microbatches * sum(load.seconds for load in held) for held in own]
    return tuple(
        StagePrediction(
            forward_seconds=load.forward_seconds,
            backward_seconds=load.backward_seconds,
            idle_seconds=max(0.0, step.seconds - busy[rank] - step.optimizer_seconds),
            in_flight=in_flight_microbatches(arrangement.schedule, stage, shape)
            if arrangement.pipeline > 1
            else 1,
            memory=memories[rank],
        )
        for stage, load in enumerate(loads)
        for rank in [_rank(stage, arrangement)]
    )
