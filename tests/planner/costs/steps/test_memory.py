"""What a rank holds, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.planner.costs.prediction import (
    Arrangement,
    LayerCost,
    MemoryPrediction,
    Offload,
    Zero,
)
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import ScheduleKind, rank_moments
from autopar.planner.costs.steps.framework import FrameworkConstants
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.costs.steps.state import reduced_state_bytes
from autopar.planner.precision import Compression, Float8, Precision
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT, layer

TWO = [LAYER, LAYER]
TWICE = replace(ARRANGEMENT, microbatches=2)  # so gradients are there from the first backward on


def _alone(
    layers: Sequence[LayerCost], arrangement: Arrangement, constants: FrameworkConstants
) -> MemoryPrediction:
    """Return the memory of a rank that has one stage and no pipeline."""
    shape = PipelineShape(ranks=1, stages_per_rank=1, microbatches=arrangement.microbatches)
    (moments,) = rank_moments(arrangement.schedule, shape)
    return memory_of([stage_load(layers)], moments, arrangement, constants)


def _of_rank(
    rank: int, kind: ScheduleKind, shape: PipelineShape, *stages: Sequence[LayerCost]
) -> MemoryPrediction:
    """Return the memory of one rank of a pipeline, with the stages that are its own."""
    arrangement = replace(ARRANGEMENT, pipeline=shape.ranks)
    moments = rank_moments(kind, shape)[rank]
    return memory_of([stage_load(layers) for layers in stages], moments, arrangement, SILENT)


def test_saved_activations_count_once_for_each_microbatch_in_flight() -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    found = _of_rank(1, ScheduleKind.ONE_F_ONE_B, shape, TWO)
    assert found.activation_bytes == 2 * 100 * 3
    assert found.transient_bytes == 40  # of one layer at a time


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", Zero)
def test_a_peak_has_all_reduced_gradients(
    zero: Zero, microbatches: int, precision: Precision
) -> None:
    shared = replace(ARRANGEMENT, data=4, shard=4, microbatches=microbatches)
    arrangement = replace(shared, zero=zero, precision=precision)
    least = reduced_state_bytes(LAYER, arrangement)
    assert least <= _alone([LAYER], arrangement, SILENT).allocated_bytes


def test_zero_3_holds_its_part_of_parameters_in_fp32() -> None:
    # 4 bytes of parameter, 4 of gradient and 8 of moments, all over 4 ranks
    held = layer(parameter_bytes=4_000_000, optimizer_bytes=8_000_000)
    shared = replace(ARRANGEMENT, data=4, shard=4, precision=Precision.FP32)
    assert reduced_state_bytes(held, replace(shared, zero=Zero.PARAMETERS)) == 4_000_000


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [
        (Zero.NONE, 4_000_000, 8_000_000, 24_000_000),
        (Zero.OPTIMIZER, 4_000_000, 8_000_000, 6_000_000),
        (Zero.GRADIENTS, 4_000_000, 2_000_000, 6_000_000),
        (Zero.PARAMETERS, 0, 2_000_000, 6_000_000),  # the optimizer's fp32 copies are all there is
    ],
)
def test_each_level_of_zero_divides_one_category_more(
    zero: Zero, parameters: int, gradients: int, optimizer: int
) -> None:
    found = _alone(TWO, replace(TWICE, data=4, shard=4, zero=zero), SILENT)
    assert found.parameter_bytes == parameters
    assert found.gradient_bytes == gradients
    assert found.optimizer_bytes == optimizer


def test_sharded_parameters_are_whole_for_two_layers_at_a_time() -> None:
    # Parameters of two neighbours, and the gradient of one.
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    big = layer(parameter_bytes=10_000_000, gradient_bytes=20_000_000)
    found = _alone([LAYER, big, LAYER], arrangement, SILENT)
    assert found.transient_bytes == 40
    assert found.unsharded_bytes == 12_000_000 + 20_000_000
    # 4 million of the elements are of products whose weights are gathered in float8; four ranks do
    # not divide the rows of another million
    narrow = replace(big, float8_weights=((2_000, 4_000_000), (2_002, 1_000_000)))
    in_float8 = replace(arrangement, float8=Float8.TENSORWISE)
    found = _alone([LAYER, narrow, LAYER], in_float8, SILENT)
    assert found.unsharded_bytes == 8_000_000 + 20_000_000


def test_the_head_has_no_gradient_yet_while_the_loss_behind_it_runs() -> None:
    # 30 MB of log-probabilities and 2 of parameters; then, with these, 10 and the gradient's 4.
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    head = layer(transient_bytes=30_000_000, learning_bytes=10_000_000)
    found = _alone([head], arrangement, SILENT)
    assert found.transient_bytes + found.unsharded_bytes == 32_000_000


def test_fp32_parameters_are_held_gathered_and_in_parts_by_zero_2() -> None:
    arrangement = replace(TWICE, data=4, shard=4, zero=Zero.GRADIENTS, precision=Precision.FP32)
    assert _alone(TWO, arrangement, SILENT).parameter_bytes == 4_000_000 + 1_000_000


def test_frozen_parameters_have_no_optimizer_that_counts_their_parts() -> None:
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    frozen = layer(trainable=0, gradient_bytes=0, optimizer_bytes=0)
    found = _alone([frozen], arrangement, SILENT)
    assert found.parameter_bytes == 2 * 2_000_000 // 4  # fp32


def test_a_split_backward_holds_the_gradients_of_results_from_its_first_half_to_its_second() -> (
    None
):
    # Rank 3 of 4: each second half comes three first halves later.
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    found = _of_rank(3, ScheduleKind.INTERLEAVED_ZERO_BUBBLE, shape, TWO)
    assert found.activation_bytes == 4 * 200 + 4 * 60


def test_a_stage_that_recomputes_is_done_with_a_microbatch_after_its_first_half() -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    again = [layer(recompute_seconds=1e-3)] * 2
    found = _of_rank(3, ScheduleKind.INTERLEAVED_ZERO_BUBBLE, shape, again)
    assert found.activation_bytes == 1 * 200


def test_the_first_stage_makes_all_its_gradients_in_the_second_half() -> None:
    # So it holds as many whether it recomputes or not, and no gradients of results.
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    kind = ScheduleKind.INTERLEAVED_ZERO_BUBBLE
    for layers in (TWO, [layer(recompute_seconds=1e-3)] * 2):
        assert _of_rank(0, kind, shape, layers).activation_bytes == 4 * 200


def test_two_stages_of_a_rank_do_not_peak_at_once() -> None:
    # Rank 0 of a V of two ranks: at most three of stage 0 and one of 3, or four of 0 and none of 3.
    shape = PipelineShape(ranks=2, stages_per_rank=2, microbatches=8)
    down, up = [layer(saved_bytes=10)], [layer(saved_bytes=40, deferred_bytes=0)]
    found = _of_rank(0, ScheduleKind.ZERO_BUBBLE_V, shape, down, up)
    assert found.activation_bytes == 3 * 10 + 40


def test_the_work_that_counts_is_that_of_the_stage_that_runs_at_the_fullest_moment() -> None:
    # Four of stage 0 (40) while its backward works (5) are more than three (30) and stage 3's one
    # (1) while its own works (12).
    shape = PipelineShape(ranks=2, stages_per_rank=2, microbatches=8)
    down = [layer(saved_bytes=10, transient_bytes=5, learning_bytes=0)]
    up = [layer(saved_bytes=1, deferred_bytes=0, transient_bytes=12, learning_bytes=0)]
    found = _of_rank(0, ScheduleKind.ZERO_BUBBLE_V, shape, down, up)
    assert (found.activation_bytes, found.transient_bytes) == (40, 5)


def test_the_margin_is_a_share_and_each_group_has_its_buffers() -> None:
    constants = replace(SILENT, margin=0.1, context_bytes=1000, communicator_bytes=10)
    arrangement = replace(ARRANGEMENT, data=2, tensor=2, shard=1)
    found = _alone(TWO, arrangement, constants)
    assert found.margin_bytes == round(0.1 * found.allocated_bytes)
    assert found.context_bytes == 1000 + 3 * 10  # all ranks, data, tensor
    assert found.device_bytes == found.allocated_bytes + found.margin_bytes + found.context_bytes


@pytest.mark.parametrize(
    ("zero", "shard", "lost"),
    [
        (Zero.NONE, 4, 4 + 1),  # all gradients, and a quarter of the mean
        (Zero.OPTIMIZER, 4, 4),  # no rank needs another's part of the mean
        (Zero.OPTIMIZER, 2, 2 + 1),  # half of the gradients, and half of that of the mean
    ],
)
def test_each_rank_keeps_what_compression_has_lost(zero: Zero, shard: int, lost: int) -> None:
    whole = replace(ARRANGEMENT, data=4, shard=shard, zero=zero, bucket_bytes=1000)
    kept = replace(whole, compression=Compression.INT8)
    before, after = (_alone(TWO, one, SILENT) for one in (whole, kept))
    gradients = sum(one.gradient_bytes for one in TWO)
    assert after.gradient_bytes - before.gradient_bytes == lost * gradients // 4
    assert after.communication_bytes == 1000 * 3 // 2


@pytest.mark.parametrize("zero", [Zero.NONE, Zero.OPTIMIZER])
def test_only_gradients_that_travel_in_16_bits_are_copied(zero: Zero) -> None:
    arrangement = replace(ARRANGEMENT, data=2, shard=2, zero=zero, bucket_bytes=1000)
    assert _alone(TWO, arrangement, SILENT).communication_bytes == 0
    compressed = replace(arrangement, compression=Compression.HALF)
    assert _alone(TWO, compressed, SILENT).communication_bytes == 1000 // 2


@pytest.mark.parametrize(
    ("zero", "precision", "device_bytes", "host_bytes"),
    [
        # 2 layers of 1,000,000 parameters: 12 bytes of states and fp32 weights, 4 of gradients, and
        # 4 of those that arrive to be added
        (Zero.NONE, Precision.BF16, 4_000_000, 40_000_000),
        (Zero.OPTIMIZER, Precision.BF16, 4_000_000, 10_000_000),
        # fp32: the host has 4 bytes of copied weights beside the states of LAYER
        (Zero.OPTIMIZER, Precision.FP32, 4_000_000, 12_000_000),
        # fully_shard gathers 2 MB of a layer while the other is at work, and keeps none
        (Zero.PARAMETERS, Precision.BF16, 0, 8_000_000),
    ],
)
def test_an_optimizer_on_the_host_leaves_the_device_its_parameters_alone(
    zero: Zero, precision: Precision, device_bytes: int, host_bytes: int
) -> None:
    shared = replace(TWICE, data=4, shard=4, zero=zero, precision=precision)
    found = _alone(TWO, replace(shared, offload=Offload.OPTIMIZER), SILENT)
    assert found.parameter_bytes == device_bytes
    assert found.optimizer_bytes == 0
    assert found.host_bytes == host_bytes
    assert _alone(TWO, shared, SILENT).host_bytes == 0
