"""What a layer costs that keeps what its backward needs in the host's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.layers.layer import layer_costs
from autopar.planner.costs.ops.pricer import OpPricer
from autopar.planner.costs.prediction import LayerCost, Modes, Recompute, Zero
from autopar.planner.costs.schedules.orders import PipelineShape
from autopar.planner.costs.schedules.table import ScheduleKind, rank_moments
from autopar.planner.costs.steps.memory import memory_of
from autopar.planner.costs.steps.stage_load import rank_groups, stage_load
from autopar.planner.costs.steps.stage_price import stage_price
from autopar.planner.costs.steps.step import predict
from autopar.planner.layers import Layer
from tests.planner.costs.layers.test_layer import LOG_SUM_EXP, SBH, STATISTICS
from tests.planner.costs.ops.op_factories import layer_of, pricer, shape, whole
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT, layer

OF_A_BLOCK = 34 * SBH + LOG_SUM_EXP + STATISTICS  # bytes that a block of GPT-2 saves


def costs(prices: OpPricer, one: Layer, bytes_per_second: float) -> Modes:
    return layer_costs(
        prices,
        one,
        whole(one),
        degree=1,
        shape=shape(1),
        parameters={},
        host_bytes_per_second=bytes_per_second,
    )


def test_everything_a_block_saves_goes_to_the_host_and_comes_back_at_once() -> None:
    prices = pricer()
    found = costs(prices, layer_of(prices, "Block"), 1e10)[Recompute.HOST]
    assert found.host_saved_bytes == OF_A_BLOCK
    assert found.saved_bytes == 0
    assert found.transient_bytes == 16 * SBH + OF_A_BLOCK
    assert (
        found.forward_seconds
        == costs(prices, layer_of(prices, "Block"), 1e10)[Recompute.NONE].forward_seconds
    )


def test_the_batch_stays_on_the_device() -> None:
    prices = pricer()
    embedding = prices.layers.layers[0]
    found = costs(prices, embedding, 1e10)
    ids = 2 * 8 * 4 * 1024  # rows and positions of int64
    assert found[Recompute.HOST].saved_bytes <= ids
    assert found[Recompute.HOST].saved_bytes + found[Recompute.HOST].host_saved_bytes == (
        found[Recompute.NONE].saved_bytes
    )


def test_copies_take_what_forward_and_backward_do_not_hide() -> None:
    prices = pricer(batch=32)  # so many rows that the device is busy all the time
    block, size = layer_of(prices, "Block"), 8 * OF_A_BLOCK
    plain = costs(prices, block, 0.0)[Recompute.NONE]
    beside = 2 * size / prices.rates.own.stream_bytes_per_second  # the device's memory is busy, too

    def waits(bytes_per_second: float) -> float:
        found = costs(prices, block, bytes_per_second)[Recompute.HOST]
        assert found.host_wait_seconds == found.recompute_seconds
        assert found.backward_seconds == plain.backward_seconds + found.host_wait_seconds
        return found.host_wait_seconds

    assert waits(1e15) == pytest.approx(beside)
    # at a rate at which a copy takes as long as forward and backward together:
    whole_seconds = plain.forward_seconds + plain.backward_seconds
    # (whole − forward) + (whole − backward) = whole
    assert waits(size / whole_seconds) == pytest.approx(whole_seconds + beside)
    # as long as the backward: there and back, only the forward is too short
    exposed = plain.backward_seconds - plain.forward_seconds
    assert waits(size / plain.backward_seconds) == pytest.approx(exposed + beside)


@pytest.mark.parametrize("mode", [mode for mode in Recompute if mode.is_on_host])
def test_without_a_link_the_host_is_no_mode_of_its_own(mode: Recompute) -> None:
    prices = pricer()
    found = costs(prices, layer_of(prices, "Block"), 0.0)
    assert found[mode] == found[Recompute.NONE]


def test_a_layer_that_runs_again_has_only_its_inputs_on_the_host() -> None:
    prices = pricer(batch=32)
    block, inputs = layer_of(prices, "Block"), 2 * 8 * SBH
    found = costs(prices, block, 1e12)
    own, full = found[Recompute.FULL_HOST], found[Recompute.FULL]
    assert (own.saved_bytes, own.host_saved_bytes) == (0, inputs)
    assert full.saved_bytes == inputs
    assert own.transient_bytes == full.transient_bytes + inputs
    # 2 · inputs pass the device's memory; forward and backward, with its recomputation, hide the
    # copies until these take longer
    beside = 2 * inputs / prices.rates.own.stream_bytes_per_second
    assert own.host_wait_seconds == pytest.approx(beside)
    assert own.recompute_seconds == pytest.approx(full.recompute_seconds + beside)
    assert own.backward_seconds == pytest.approx(full.backward_seconds + beside)
    slow = costs(prices, block, inputs / full.backward_seconds)[Recompute.FULL_HOST]
    exposed = full.backward_seconds - full.forward_seconds
    assert slow.host_wait_seconds == pytest.approx(exposed + beside)


def there(**changes: float) -> LayerCost:
    """Return a layer that saves 1000 bytes on the host, and works with all of them and 40 more."""
    return layer(
        saved_bytes=0,
        host_saved_bytes=1000,
        transient_bytes=1040,
        learning_bytes=0,
        deferred_bytes=0,
        recompute_seconds=1e-4,
        host_wait_seconds=1e-4,
        gradient_bytes=0,
        **changes,
    )


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("zero", [Zero.NONE, Zero.PARAMETERS])
def test_a_device_has_room_for_two_layers_and_the_host_for_all(
    microbatches: int, zero: Zero
) -> None:
    one = there()
    arrangement = replace(ARRANGEMENT, data=2, shard=2, microbatches=microbatches, zero=zero)
    shape = PipelineShape(ranks=1, stages_per_rank=1, microbatches=microbatches)
    (moments,) = rank_moments(arrangement.schedule, shape)
    alone, two, nine = (
        memory_of([stage_load([one] * number)], moments, arrangement, SILENT)
        for number in (1, 2, 9)
    )
    assert (alone.host_bytes, two.host_bytes, nine.host_bytes) == (1000, 2000, 9000)
    needed = [
        found.activation_bytes + found.transient_bytes + found.unsharded_bytes
        for found in (alone, two, nine)
    ]
    assert needed[2] == needed[1]
    gathered = zero.divides_parameters * LAYER.parameter_bytes  # of the next layer
    assert needed[1] == needed[0] + 1000 + gathered


def test_the_layer_behind_them_finds_the_tensors_of_one_on_the_device() -> None:
    shape = PipelineShape(ranks=1, stages_per_rank=1, microbatches=2)
    (moments,) = rank_moments(ARRANGEMENT.schedule, shape)
    head = layer(saved_bytes=500, transient_bytes=9000, learning_bytes=0)
    found = memory_of(
        [stage_load([there(), there(), head])],
        moments,
        replace(ARRANGEMENT, microbatches=2),
        SILENT,
    )
    assert found.activation_bytes == 500
    assert found.transient_bytes == 9000 + 1000


def test_a_backward_after_another_forward_waits_for_its_first_tensors() -> None:
    arrangement = replace(ARRANGEMENT, pipeline=2, microbatches=4)
    groups = rank_groups(choose_cluster(2, "h100-sxm"), arrangement)
    layers = [there(), replace(there(), host_saved_bytes=512_000_000), layer(saved_bytes=1)]
    backwards = [
        stage_price(
            layers, stage, arrangement=arrangement, groups=groups, constants=SILENT
        ).load.backward_seconds
        for stage in (0, 1)
    ]
    # 512 MB at 0.8 · 64 GB/s; the last stage runs its backward right after the forward
    assert backwards[0] - backwards[1] == pytest.approx(10e-3)
    assert backwards[1] == pytest.approx(sum(one.backward_seconds for one in layers))


def test_copies_are_told_with_their_time_and_what_of_it_is_exposed() -> None:
    cluster = choose_cluster(1, "h100-sxm")
    saved = replace(there(), host_saved_bytes=512_000_000, host_wait_seconds=4e-3)
    found = predict(
        [[saved, saved, LAYER]],
        replace(ARRANGEMENT, microbatches=3),
        cluster,
        constants=SILENT,
        model_flops=1,
    )
    (copies,) = (one for one in found.communication if one.collective == "copy")
    # of 2 layers, the last stays; 512 MB there and back in 3 microbatches, at 0.8 · 64 GB/s
    assert copies.count == 6
    assert copies.payload_bytes == 6 * 512_000_000
    assert copies.seconds == pytest.approx(6 * 10e-3)
    assert found.stages[0].memory.host_bytes == 512_000_000
    assert copies.exposed_seconds == pytest.approx(3 * 2 * 4e-3)


def test_the_host_holds_all_microbatches_in_flight() -> None:
    shape = PipelineShape(ranks=4, stages_per_rank=1, microbatches=8)
    moments = rank_moments(ScheduleKind.ONE_F_ONE_B, shape)[1]
    arrangement = replace(ARRANGEMENT, pipeline=4, microbatches=8)
    found = memory_of([stage_load([there(), there()])], moments, arrangement, SILENT)
    assert found.host_bytes == 2 * 1000 * 3
