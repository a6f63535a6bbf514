"""What a rank holds, by category."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.costs.memory import Held, memory_of
from autopar.planner.costs.prediction import Zero
from autopar.planner.costs.stage_load import stage_load
from autopar.planner.precision import Precision
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT, layer

TWO = Held(load=stage_load([LAYER, LAYER]), in_flight=3)


def test_saved_activations_count_once_for_each_microbatch_in_flight() -> None:
    found = memory_of([TWO], ARRANGEMENT, SILENT)
    assert found.activation_bytes == 2 * 100 * 3
    assert found.transient_bytes == 40  # of one layer at a time


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
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=zero)
    found = memory_of([TWO], arrangement, SILENT)
    assert found.parameter_bytes == parameters
    assert found.gradient_bytes == gradients
    assert found.optimizer_bytes == optimizer


def test_sharded_parameters_are_whole_for_two_layers_at_a_time() -> None:
    # Parameters of two neighbours, and the gradient of one.
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    big = layer(parameter_bytes=10_000_000, gradient_bytes=20_000_000)
    found = memory_of(
        [Held(load=stage_load([LAYER, big, LAYER]), in_flight=1)], arrangement, SILENT
    )
    assert found.transient_bytes == 40
    assert found.unsharded_bytes == 12_000_000 + 20_000_000


def test_the_head_has_no_gradient_yet_while_the_loss_behind_it_runs() -> None:
    # 30 MB of log-probabilities and 2 of parameters; then, with these, 10 and the gradient's 4.
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    head = layer(transient_bytes=30_000_000, learning_bytes=10_000_000)
    found = memory_of([Held(load=stage_load([head]), in_flight=1)], arrangement, SILENT)
    assert found.transient_bytes + found.unsharded_bytes == 32_000_000


def test_fp32_parameters_are_held_gathered_and_in_parts_by_zero_2() -> None:
    arrangement = replace(
        ARRANGEMENT, data=4, shard=4, zero=Zero.GRADIENTS, precision=Precision.FP32
    )
    assert memory_of([TWO], arrangement, SILENT).parameter_bytes == 4_000_000 + 1_000_000


def test_frozen_parameters_have_no_optimizer_that_counts_their_parts() -> None:
    arrangement = replace(ARRANGEMENT, data=4, shard=4, zero=Zero.PARAMETERS)
    frozen = layer(trainable=0, gradient_bytes=0, optimizer_bytes=0)
    found = memory_of([Held(load=stage_load([frozen]), in_flight=1)], arrangement, SILENT)
    assert found.parameter_bytes == 2 * 2_000_000 // 4  # fp32


def test_a_split_backward_holds_the_gradients_of_results_from_its_first_half_to_its_second() -> (
    None
):
    load = stage_load([LAYER, LAYER])
    held = Held(load=load, in_flight=3, deferred=2)
    assert memory_of([held], ARRANGEMENT, SILENT).activation_bytes == 3 * 200 + 2 * 60


def test_a_rank_with_two_stages_holds_both() -> None:
    one = memory_of([TWO], ARRANGEMENT, SILENT)
    both = memory_of([TWO, TWO], ARRANGEMENT, SILENT)
    assert both.parameter_bytes == 2 * one.parameter_bytes
    assert both.activation_bytes == 2 * one.activation_bytes
    assert both.transient_bytes == one.transient_bytes


def test_the_margin_is_a_share_and_each_group_has_its_buffers() -> None:
    constants = replace(SILENT, margin=0.1, context_bytes=1000, communicator_bytes=10)
    arrangement = replace(ARRANGEMENT, data=2, tensor=2, shard=1)
    found = memory_of([TWO], arrangement, constants)
    assert found.margin_bytes == round(0.1 * found.allocated_bytes)
    assert found.context_bytes == 1000 + 3 * 10  # all ranks, data, tensor
    assert found.device_bytes == found.allocated_bytes + found.margin_bytes + found.context_bytes


def test_one_rank_has_no_buffers_for_others() -> None:
    found = memory_of([TWO], ARRANGEMENT, replace(SILENT, communicator_bytes=10))
    assert found.context_bytes == 0
    assert found.communication_bytes == 0


@pytest.mark.parametrize("zero", [Zero.NONE, Zero.OPTIMIZER])
def test_only_gradients_that_travel_in_16_bits_are_copied(zero: Zero) -> None:
    arrangement = replace(ARRANGEMENT, data=2, shard=2, zero=zero, bucket_bytes=1000)
    assert memory_of([TWO], arrangement, SILENT).communication_bytes == 0
    compressed = replace(arrangement, compressed_gradients=True)
    assert memory_of([TWO], compressed, SILENT).communication_bytes == 1000 // 2
