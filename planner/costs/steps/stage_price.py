"""Prices one stage alone: all that a step asks of it, whichever layers the other stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.planner.costs.kernels.compute import Throughput
from autopar.planner.costs.prediction import Arrangement, LayerCost, Zero
from autopar.planner.costs.schedules.pipeline import rank_of
from autopar.planner.costs.schedules.simulation import StageSeconds
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.costs.steps.data_parallel import (
    DataGroups,
    DataSeconds,
    copy_byte_seconds,
    data_seconds,
)
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.optimizer import optimizer_seconds
from autopar.planner.costs.steps.rank_groups import RankGroups, summed_seconds
from autopar.planner.costs.steps.stage_load import StageLoad, stage_load
from autopar.planner.precision import copy_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """The seconds and bytes of one stage."""

    load: StageLoad
    data: DataSeconds
    seconds: StageSeconds  # as the schedule sees it
    transfer_seconds: float  # of what it gives to the next stage, of one microbatch
    reduction_seconds: float  # after its last backward: over the data ranks and the tensor axis
    optimizer_seconds: float  # those of the stages of a rank add up


def stage_price(
    layers: Sequence[LayerCost],
    stage: int,
    *,
    arrangement: Arrangement,
    groups: RankGroups,
    constants: FrameworkConstants,
) -> StagePrice:
    """Return the price of some layers as a stage."""
    load = stage_load(layers)
    data = data_seconds(
        load.layers,
        data_groups(groups, arrangement, constants, stage=stage),
        microbatches=arrangement.microbatches,
    )
    is_pipeline = arrangement.pipeline > 1
    splits = is_pipeline and SCHEDULES[arrangement.schedule].splits_backward
    return StagePrice(
        load=load,
        data=data,
        seconds=load.stage_seconds(
            forward_more=data.forward_wait,
            backward_more=data.backward_wait,
            action_seconds=constants.action_seconds,
            splits=splits and stage > 0,  # the first one has weights alone to make gradients for
        ),
        transfer_seconds=groups.transfer_seconds(load.output_bytes) if is_pipeline else 0.0,
        reduction_seconds=data.last_backward
        + summed_seconds(groups.tensor, load.replicated_gradient_bytes),
        optimizer_seconds=_optimizer_seconds(
            load,
            groups.stage_rates[rank_of(arrangement.schedule, stage, arrangement.pipeline)],
            arrangement,
            constants,
        ),
    )


def _optimizer_seconds(
    load: StageLoad,
    devices: Sequence[Throughput],
    arrangement: Arrangement,
    constants: FrameworkConstants,
) -> float:
    """Return the optimizer's seconds for one stage, on the slowest device of its rank."""
    share = arrangement.shard if arrangement.zero is not Zero.NONE else 1
    updated = max(
        optimizer_seconds(
            load.trainable / share,
            gradient_bytes=4,
            copy_bytes=copy_bytes(arrangement.precision),
            passes=constants.optimizer_passes,
            rates=rates,
            element_seconds=constants.optimizer_element_seconds,
        )
        for rates in devices
    )
    return updated + load.trainable_tensors * constants.optimizer_tensor_seconds


def data_groups(
    groups: RankGroups, arrangement: Arrangement, constants: FrameworkConstants, *, stage: int
) -> DataGroups:
    """Return how the ranks that share the data of a stage share its state."""
    rank = rank_of(arrangement.schedule, stage, arrangement.pipeline)
    return DataGroups(
        data=groups.data,
        shard=groups.shard if arrangement.zero is not Zero.NONE else groups.data,
        replicas=groups.replicas,
        zero=arrangement.zero,
        bucket_bytes=arrangement.bucket_bytes,
        gradient_share=sent_share(arrangement),
        slowdown=constants.overlap_slowdown,
        copy_byte_seconds=copy_byte_seconds(groups.slowest_rates(rank)),
        gathers_ahead=constants.gathers_ahead,
    )


def sent_share(arrangement: Arrangement) -> float:
    """Return how much of a gradient's bytes travels: LayerCost counts fp32."""
    return 0.5 if arrangement.compressed_gradients else 1.0
