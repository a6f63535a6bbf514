"""What sharing data adds to a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.prediction import Offload, Zero
from autopar.planner.costs.steps.stage_load import sent_bytes, stage_load
from autopar.planner.costs.steps.stage_price import DataGroups, data_seconds
from autopar.planner.costs.steps.state import float8_parts
from autopar.planner.precision import Compression, Float8
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, layer

CLUSTER = choose_cluster(8, "h100-sxm")
ALL = group_shape(CLUSTER, 8, 1)
ONE = group_shape(CLUSTER, 1, 1)
FOUR, TWO = group_shape(CLUSTER, 4, 1), group_shape(CLUSTER, 2, 4)
GROUPS = DataGroups(
    data=ALL,
    shard=ALL,
    replicas=ONE,
    zero=Zero.NONE,
    bucket_bytes=2**62,
    compression=Compression.NONE,
    slowdown=0.0,
    copy_byte_seconds=0.0,
)
LAYERS = stage_load([LAYER] * 4).layers


def test_whole_gradients_are_reduced_once_after_the_last_microbatch() -> None:
    found = data_seconds(LAYERS, GROUPS, microbatches=3)
    alone = collective_seconds(Collective.ALL_REDUCE, 4 * LAYER.gradient_bytes, ALL)
    assert found.last_backward == pytest.approx(alone)
    assert found.each_backward == 0.0


def test_scattered_gradients_and_gathered_parameters_stand_for_zero_1() -> None:
    found = data_seconds(LAYERS, replace(GROUPS, zero=Zero.OPTIMIZER), microbatches=3)
    scatter = collective_seconds(Collective.REDUCE_SCATTER, 4 * LAYER.gradient_bytes, ALL)
    gather = collective_seconds(Collective.ALL_GATHER, 4 * LAYER.parameter_bytes, ALL)
    assert found.last_backward == pytest.approx(scatter)
    assert found.first_forward == pytest.approx(gather)


def test_gradients_in_int8_are_exchanged_and_their_mean_is_gathered() -> None:
    kept = replace(GROUPS, compression=Compression.INT8)
    sent = 4 * LAYER.gradient_bytes * 260 / 1024  # 256 bytes and a scale of 4, for 256 of fp32
    exchange = collective_seconds(Collective.ALL_TO_ALL, sent, ALL)
    gather = collective_seconds(Collective.ALL_GATHER, sent, ALL)
    found = data_seconds(LAYERS, kept, microbatches=3)
    assert found.last_backward == pytest.approx(exchange + gather)
    divided = data_seconds(LAYERS, replace(kept, zero=Zero.OPTIMIZER), microbatches=3)
    assert divided.last_backward == pytest.approx(exchange)


def test_with_copies_only_messages_between_copies_are_compressed() -> None:
    groups = replace(GROUPS, zero=Zero.OPTIMIZER, compression=Compression.INT8, shard=FOUR)
    found = data_seconds(LAYERS, replace(groups, replicas=TWO), microbatches=3)
    size = 4 * LAYER.gradient_bytes
    sent = size / 4 * 260 / 1024
    seconds = collective_seconds(Collective.REDUCE_SCATTER, size, FOUR)
    seconds += collective_seconds(Collective.ALL_TO_ALL, sent, TWO)
    seconds += collective_seconds(Collective.ALL_GATHER, sent, TWO)
    assert found.last_backward == pytest.approx(seconds)


def test_what_tensor_ranks_add_up_is_sent_whole() -> None:
    assert sent_bytes(1024, 0, 0, Compression.INT8) == 260
    assert sent_bytes(1024 + 512, 512, 0, Compression.INT8) == 512 + 260
    assert sent_bytes(1024, 512, 0, Compression.HALF) == 512


def test_published_frameworks_gather_beside_the_forward_all_but_the_first_layer() -> None:
    slow = stage_load([layer(forward_seconds=0.1)] * 4).layers
    ahead = replace(GROUPS, zero=Zero.OPTIMIZER, gathers_ahead=True)
    found = data_seconds(slow, ahead, microbatches=3)
    one = collective_seconds(Collective.ALL_GATHER, LAYER.parameter_bytes, ALL)
    assert found.first_forward == pytest.approx(one)


def test_nothing_is_computed_beside_the_gathers_of_zero_1() -> None:
    slow = stage_load([layer(forward_seconds=0.1)] * 4).layers
    by_layer = replace(GROUPS, zero=Zero.OPTIMIZER, bucket_bytes=LAYER.parameter_bytes)
    found = data_seconds(slow, by_layer, microbatches=3)
    gather = collective_seconds(Collective.ALL_GATHER, LAYER.parameter_bytes, ALL)
    assert found.first_forward == pytest.approx(4 * gather)
    beside = data_seconds(slow, replace(by_layer, zero=Zero.GRADIENTS), microbatches=3)
    assert beside.first_forward == pytest.approx(gather)


@pytest.mark.parametrize(
    ("zero", "bucket_layers", "gathers", "reductions"),
    [
        (Zero.NONE, 4, 0, 1),
        (Zero.NONE, 3, 0, 2),
        (Zero.OPTIMIZER, 2, 2, 2),
        (Zero.GRADIENTS, 4, 4, 3 * 4),
        (Zero.PARAMETERS, 4, 3 * 8, 3 * 4),
    ],
)
def test_collectives_are_counted_by_the_bucket_or_by_the_layer(
    zero: Zero, bucket_layers: int, gathers: int, reductions: int
) -> None:
    filled = layer(parameter_bytes=1000, gradient_bytes=1000)
    groups = replace(GROUPS, zero=zero, bucket_bytes=1000 * bucket_layers)
    found = data_seconds(stage_load([filled] * 4).layers, groups, microbatches=3)
    assert (found.gathers, found.reductions) == (gathers, reductions)


def test_zero_2_scatters_in_every_microbatch() -> None:
    found = data_seconds(LAYERS, replace(GROUPS, zero=Zero.GRADIENTS), microbatches=3)
    assert found.each_backward > 0
    assert found.last_backward == 0.0


def test_zero_3_gathers_twice_per_microbatch_and_hides_most_of_it() -> None:
    slow = stage_load([layer(forward_seconds=0.1, backward_seconds=0.2)] * 4).layers
    found = data_seconds(slow, replace(GROUPS, zero=Zero.PARAMETERS), microbatches=3)
    gather = collective_seconds(Collective.ALL_GATHER, LAYER.parameter_bytes, ALL)
    scatter = collective_seconds(Collective.REDUCE_SCATTER, LAYER.gradient_bytes, ALL)
    # Only the first gather of each pass and the last scatter stand alone.
    assert found.each_forward == pytest.approx(gather)
    assert found.each_backward == pytest.approx(gather + scatter)
    assert found.gathers_alone == pytest.approx(2 * 3 * 4 * gather)


def test_weights_in_float8_take_half_of_their_bytes_and_only_zero_3_gathers_them_so() -> None:
    # of 2 MB in 16 bits, 800,000 elements are of float8 products: 1.2 MB are gathered
    half = stage_load([replace(LAYER, float8_weights=((800, 800_000),))] * 4).layers
    sharded = replace(GROUPS, zero=Zero.PARAMETERS, float8_parts=8)
    found = data_seconds(half, sharded, microbatches=1)
    gather = collective_seconds(Collective.ALL_GATHER, 1_200_000, ALL)
    assert found.gathers_alone == pytest.approx(2 * 4 * gather)

    arrangement = replace(ARRANGEMENT, data=8, shard=8, float8=Float8.TENSORWISE)
    assert float8_parts(replace(arrangement, zero=Zero.PARAMETERS)) == 8
    for other in (
        replace(arrangement, zero=Zero.GRADIENTS),
        replace(arrangement, zero=Zero.PARAMETERS, float8=Float8.ROWWISE),
        replace(arrangement, zero=Zero.PARAMETERS, offload=Offload.OPTIMIZER),
    ):
        assert float8_parts(other) == 0


def test_a_weight_whose_rows_the_ranks_do_not_divide_is_gathered_in_16_bits() -> None:
    weights = ((800, 500_000), (804, 300_000))
    some = stage_load([replace(LAYER, float8_weights=weights)] * 4).layers
    sharded = replace(GROUPS, zero=Zero.PARAMETERS, float8_parts=8)
    found = data_seconds(some, sharded, microbatches=1)
    gather = collective_seconds(Collective.ALL_GATHER, 1_500_000, ALL)  # 804 = 8 · 100.5
    assert found.gathers_alone == pytest.approx(2 * 4 * gather)


def test_few_ranks_take_longer_to_cast_parts_than_to_cast_whole_weights() -> None:
    slow = layer(forward_seconds=0.1, backward_seconds=0.2)
    slow = replace(slow, float8_weights=((1000, 1_000_000),))
    loads, copying = stage_load([slow] * 4).layers, 2e-12  # 1 TB/s: a byte is read and written
    for ranks, moved in ((2, 21), (4, 7.5), (8, 0.75), (10, 0), (100, 0)):
        # 2 · 27 ÷ ranks − 6 bytes of each element, in the backward; copies as without float8
        narrow, whole = (
            data_seconds(
                loads,
                replace(
                    GROUPS, zero=Zero.PARAMETERS, float8_parts=parts, copy_byte_seconds=copying
                ),
                microbatches=1,
            )
            for parts in (ranks, 0)
        )
        gathers = (narrow.gathers_alone - whole.gathers_alone) / 8
        copies = -2 * 4 * 1_000_000 * copying  # into and out of buffers: half of the bytes
        more = narrow.each_forward + narrow.each_backward
        more -= whole.each_forward + whole.each_backward
        expected = 2 * gathers + copies + 4 * 1_000_000 * moved * 1e-12
        assert more == pytest.approx(expected, abs=1e-9)


def test_gathered_parameters_are_copied_out_of_their_buffer() -> None:
    # 4 layers · 2 passes over 2 MB at 1 GB/s = 16 ms in the forward.
    sharded = replace(GROUPS, zero=Zero.PARAMETERS)
    quick, slow = (
        data_seconds(LAYERS, replace(sharded, copy_byte_seconds=each), microbatches=1)
        for each in (0.0, 2e-9)
    )
    assert slow.each_forward - quick.each_forward == pytest.approx(16e-3, rel=0.02)


def test_copies_of_the_shards_are_summed_after_scattering() -> None:
    two = replace(
        GROUPS, zero=Zero.OPTIMIZER, shard=group_shape(CLUSTER, 4, 1),
        replicas=group_shape(CLUSTER, 2, 4),
    )  # fmt: skip
    found = data_seconds(LAYERS, two, microbatches=1)
    size = 4 * LAYER.gradient_bytes
    expected = collective_seconds(Collective.REDUCE_SCATTER, size, two.shard)
    expected += collective_seconds(Collective.ALL_REDUCE, size / 4, two.replicas)
    assert found.last_backward == pytest.approx(expected)
