"""What a whole step takes: its terms, its bounds, and how it answers to its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.prediction import Arrangement, LayerCost, Prediction, Zero
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.costs.steps.bounds import least_step_seconds
from autopar.planner.costs.steps.stage_load import stage_load
from autopar.planner.costs.steps.step import predict
from autopar.planner.precision import Compression, Precision
from tests.cells import examples
from tests.clock import least_seconds
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT, layer


def predicted(
    stages: Sequence[Sequence[LayerCost]], arrangement: Arrangement, **changes: float
) -> Prediction:
    """Predict on as many H100 as the arrangement has ranks."""
    return predict(
        stages,
        arrangement,
        choose_cluster(arrangement.ranks, "h100-sxm"),
        constants=replace(SILENT, **changes),  # type: ignore[arg-type]
        model_flops=10**15,
    )


def seconds_of(prediction: Prediction) -> dict[str, float]:
    return {term.name: term.seconds for term in prediction.terms}


def test_one_rank_computes_and_steps_its_optimizer() -> None:
    # 2 layers · 3 microbatches · 3 ms, and nothing else but AdamW on 2 million parameters.
    found = predicted([[LAYER, LAYER]], replace(ARRANGEMENT, microbatches=3))
    assert seconds_of(found)["compute"] == pytest.approx(18e-3)
    assert found.step_seconds == pytest.approx(18e-3 + seconds_of(found)["optimizer"])
    assert found.communication == ()


@pytest.mark.parametrize(
    ("degrees", "sums"),
    [
        ({"data": 2}, 0),  # all have the same gradients
        ({"data": 2, "shard": 2, "zero": Zero.OPTIMIZER}, 1),
        ({"tensor": 2}, 1),
        ({"pipeline": 2}, 1),
        ({"pipeline": 2, "tensor": 2}, 2),
    ],
)
def test_a_norm_is_summed_over_every_axis_whose_ranks_have_other_gradients(
    degrees: dict[str, int], sums: int
) -> None:
    nothing = layer(trainable=0, trainable_tensors=0)
    arrangement = replace(ARRANGEMENT, **degrees)  # type: ignore[arg-type]
    found = predicted([[nothing]] * arrangement.pipeline, arrangement)
    group = group_shape(choose_cluster(2, "h100-sxm"), 2, 1)
    once = collective_seconds(Collective.ALL_REDUCE, 8, group)
    assert once > 0
    assert seconds_of(found)["optimizer"] == pytest.approx(sums * once)


@pytest.mark.parametrize("microbatches", [1, 3, 7, 10, 23])
def test_one_rank_has_no_bubble_not_even_of_rounding(microbatches: int) -> None:
    uneven = layer(forward_seconds=0.1e-3, backward_seconds=0.7e-3, recompute_seconds=0.3e-3)
    found = predicted([[uneven] * 3], replace(ARRANGEMENT, microbatches=microbatches))
    assert seconds_of(found)["pipeline bubble"] == 0.0


@pytest.mark.parametrize(
    ("precision", "is_fused", "moved"),
    [
        (Precision.FP32, False, 40),
        (Precision.BF16, False, 46),
        (Precision.FP16, False, 54),
        (Precision.BF16, True, 30),
        (Precision.FP16, True, 38),
    ],
)
def test_the_optimizer_moves_bytes_of_its_state_of_clipping_and_of_copies(
    precision: Precision, is_fused: bool, moved: int
) -> None:
    # AdamW 28: 24 of fp32 state and 4 of the gradient. Clipping 12. The 16-bit weight 6, which a
    # fused kernel only writes (2). fp16 unscales the gradient, 8. At 0.9 · 3.35 TB/s, of which
    # kernels over many tensors reach 0.8.
    arrangement = replace(ARRANGEMENT, precision=precision)
    found = predicted([[layer(trainable=10**8)]], arrangement, fuses_gradients=is_fused)
    bandwidth = 0.9 * 3.35e12 * (1 if is_fused else 0.8)
    assert seconds_of(found)["optimizer"] == pytest.approx(moved * 1e8 / bandwidth, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, 12),  # of the only microbatch: 6 at half of the bandwidth
        ({"microbatches": 4}, 12 + 9),  # three of four are added: 12 each
        ({"precision": Precision.FP32}, 0),
        ({"precision": Precision.FP32, "microbatches": 2}, 6),
        ({"data": 2, "microbatches": 2}, 12 + 6 + 4),  # and once copied into buckets: 8
        ({"data": 2, "shard": 2, "zero": Zero.PARAMETERS}, 12),  # and fully_shard's own copies
    ],
)
def test_a_backward_casts_gradients_and_adds_them_up(
    changes: dict[str, object], moved: float
) -> None:
    arrangement = replace(ARRANGEMENT, **changes)  # type: ignore[arg-type]
    heavy = layer(gradient_bytes=4 * 10**8)
    plain, fused = (
        predicted([[heavy]], arrangement, fuses_gradients=is_fused).stages[0].backward_seconds
        for is_fused in (False, True)
    )
    assert plain - fused == pytest.approx(moved * 1e8 / (0.9 * 3.35e12), rel=0.01)


def test_a_zero_bubble_schedule_casts_gradients_when_they_are_made() -> None:
    heavy = replace(stage_load([LAYER]), gradient_seconds=5e-3)
    found = heavy.stage_seconds(
        forward_more=0.0, backward_more=0.0, action_seconds=0.0, splits=True
    )
    assert found.input_gradient_seconds == pytest.approx(1e-3)
    assert found.weight_gradient_seconds == pytest.approx(6e-3)


def test_frameworks_add_to_each_step_and_each_action() -> None:
    # Once 8 ms, and 2 actions · 4 microbatches · 0.5 ms.
    arrangement = replace(ARRANGEMENT, microbatches=4)
    quiet = predicted([[LAYER]], arrangement)
    loud = predicted([[LAYER]], arrangement, step_seconds=8e-3, action_seconds=0.5e-3)
    assert loud.step_seconds - quiet.step_seconds == pytest.approx(12e-3)
    assert seconds_of(loud)["host overhead"] == pytest.approx(12e-3)


def test_an_even_pipeline_idles_for_its_ranks_but_one() -> None:
    # (m + p − 1)·t = (8 + 3)·3 ms with transfers that cost next to nothing.
    arrangement = replace(ARRANGEMENT, pipeline=4, microbatches=8)
    found = predicted([[layer(output_bytes=0)]] * 4, arrangement)
    assert seconds_of(found)["compute"] == pytest.approx(24e-3)
    assert seconds_of(found)["pipeline bubble"] == pytest.approx(9e-3)


def test_recomputation_and_tensor_communication_stand_apart() -> None:
    one = layer(backward_seconds=3.5e-3, recompute_seconds=1e-3, communication_seconds=0.5e-3)
    found = seconds_of(predicted([[one]], replace(ARRANGEMENT, tensor=2)))
    assert found["recompute"] == pytest.approx(1e-3)
    assert found["tensor communication"] == pytest.approx(0.5e-3)
    assert found["compute"] == pytest.approx(3e-3)


def test_a_reduction_of_one_bucket_hides_behind_nothing() -> None:
    arrangement = replace(ARRANGEMENT, data=8, shard=1, bucket_bytes=2**62)
    found = predicted([[LAYER] * 8], arrangement)
    (reduction,) = found.communication
    assert reduction.reason.startswith("gradients")
    assert reduction.exposed_seconds == pytest.approx(reduction.seconds)
    assert reduction.payload_bytes == 8 * LAYER.gradient_bytes


@pytest.mark.parametrize("bucket_bytes", [2**20, 2**62])
def test_each_exposed_second_is_of_one_message(bucket_bytes: int) -> None:
    arrangement = replace(ARRANGEMENT, data=4, tensor=2, bucket_bytes=bucket_bytes)
    found = predicted([[layer(replicated_gradient_bytes=10**6)] * 8], arrangement)
    data, summed = sorted(found.communication, key=lambda one: one.ranks, reverse=True)
    assert (data.ranks, summed.ranks) == (4, 2)
    assert data.exposed_seconds > 0
    assert summed.exposed_seconds == pytest.approx(summed.seconds)
    terms = seconds_of(found)
    assert terms["exposed data parallel"] == pytest.approx(data.exposed_seconds)
    assert terms["tensor communication"] == pytest.approx(summed.exposed_seconds)
    assert sum(terms.values()) == pytest.approx(found.step_seconds)


def test_buckets_hide_most_of_a_reduction() -> None:
    whole = replace(ARRANGEMENT, data=8, bucket_bytes=2**62)
    buckets = replace(whole, bucket_bytes=8_000_000)
    long = layer(backward_seconds=20e-3)
    assert (
        predicted([[long] * 8], buckets).step_seconds < predicted([[long] * 8], whole).step_seconds
    )


def test_gradients_of_16_bits_travel_in_less_time() -> None:
    wide = replace(ARRANGEMENT, data=8, bucket_bytes=2**62)
    narrow = replace(wide, compression=Compression.HALF)
    assert (
        predicted([[LAYER] * 8], narrow).step_seconds < predicted([[LAYER] * 8], wide).step_seconds
    )


def test_replicated_parameters_are_summed_over_the_tensor_axis_once() -> None:
    arrangement = replace(ARRANGEMENT, tensor=2, microbatches=5)
    found = predicted([[layer(replicated_gradient_bytes=1000)]], arrangement)
    (term,) = found.communication
    assert (term.count, term.payload_bytes, term.ranks) == (1, 1000, 2)


def test_shared_weights_are_summed_between_the_ends_of_a_pipeline() -> None:
    arrangement = replace(ARRANGEMENT, pipeline=2, microbatches=2)
    cluster = choose_cluster(2, "h100-sxm")
    apart, tied = (
        predict(
            [[LAYER], [LAYER]], arrangement, cluster,
            constants=SILENT, model_flops=1, tied_gradient_bytes=size,
        )
        for size in (0, 10**9)
    )  # fmt: skip
    more = tied.step_seconds - apart.step_seconds
    assert more > 1e-3
    assert seconds_of(tied) == {**seconds_of(apart), "tied weights": pytest.approx(more)}


@pytest.mark.parametrize(
    ("kind", "is_sent"),
    [(ScheduleKind.INTERLEAVED_1F1B, True), (ScheduleKind.ZERO_BUBBLE_V, False)],
)
def test_shared_weights_are_sent_only_if_two_ranks_hold_them(
    kind: ScheduleKind, is_sent: bool
) -> None:
    # Stages 0 and 3 are on rank 0 in a V, and on ranks 0 and 1 in turn.
    arrangement = replace(ARRANGEMENT, pipeline=2, microbatches=4, schedule=kind, stages_per_rank=2)
    cluster = choose_cluster(2, "h100-sxm")
    apart, tied = (
        predict(
            [[LAYER]] * 4, arrangement, cluster,
            constants=SILENT, model_flops=1, tied_gradient_bytes=size,
        )
        for size in (0, 10**9)
    )  # fmt: skip
    assert (tied.step_seconds > apart.step_seconds) is is_sent
    assert (tied.communication != apart.communication) is is_sent


def test_only_waits_for_transfers_are_exposed() -> None:
    # Receivers that ask for a tensor wait for all of it. Interleaved ranks compute meanwhile, but
    # for the first and the last microbatches.
    exposed = {}
    for kind, per_rank in ((ScheduleKind.GPIPE, 1), (ScheduleKind.INTERLEAVED_1F1B, 2)):
        arrangement = replace(
            ARRANGEMENT, pipeline=2, microbatches=32, schedule=kind, stages_per_rank=per_rank
        )
        stages = [[layer(output_bytes=10**7)]] * (2 * per_rank)
        free = predicted([[layer(output_bytes=0)]] * (2 * per_rank), arrangement)
        found = predicted(stages, arrangement)
        term = next(one for one in found.communication if "between stages" in one.reason)
        waits = found.step_seconds - free.step_seconds
        assert term.exposed_seconds == pytest.approx(min(term.seconds, waits), rel=0.02)
        exposed[kind] = term.exposed_seconds / term.seconds
    assert exposed[ScheduleKind.GPIPE] > 0.9
    assert exposed[ScheduleKind.INTERLEAVED_1F1B] < 0.5


@pytest.mark.parametrize("zero", list(Zero))
@pytest.mark.parametrize(
    ("kind", "per_rank"),
    [
        (ScheduleKind.GPIPE, 1),
        (ScheduleKind.ONE_F_ONE_B, 1),
        (ScheduleKind.INTERLEAVED_1F1B, 2),
        (ScheduleKind.INTERLEAVED_ZERO_BUBBLE, 2),
        (ScheduleKind.ZERO_BUBBLE_V, 2),
    ],
)
def test_terms_sum_to_the_step(kind: ScheduleKind, per_rank: int, zero: Zero) -> None:
    arrangement = replace(
        ARRANGEMENT, pipeline=2, data=4, shard=4, microbatches=8, schedule=kind,
        stages_per_rank=per_rank, zero=zero,
    )  # fmt: skip
    uneven = [[layer(forward_seconds=1e-3 * (1 + stage % 3))] * 3 for stage in range(2 * per_rank)]
    found = predicted(uneven, arrangement, overlap_slowdown=0.1, action_seconds=1e-4)
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.step_seconds)
    assert all(term.seconds >= -1e-12 for term in found.terms)
    assert len(found.stages) == 2 * per_rank


counts = st.integers(1, 16)


@settings(max_examples=examples(60))
@given(
    pipeline=st.sampled_from((1, 2, 4, 8)),
    microbatches=counts,
    times=st.lists(st.floats(1e-4, 1e-2), min_size=8, max_size=8),
    kind=st.sampled_from((ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)),
)
def test_no_cut_of_the_layers_beats_the_bound(
    pipeline: int, microbatches: int, times: list[float], kind: ScheduleKind
) -> None:
    arrangement = replace(ARRANGEMENT, pipeline=pipeline, microbatches=microbatches, schedule=kind)
    layers = [layer(forward_seconds=t, backward_seconds=2 * t) for t in times]
    each = 8 // pipeline
    stages = [layers[i * each : (i + 1) * each] for i in range(pipeline)]
    bound = least_step_seconds(3 * sum(times), arrangement)
    assert predicted(stages, arrangement).step_seconds >= bound * (1 - 1e-9)


def test_the_bound_of_two_stages_and_two_microbatches_is_four_thirds() -> None:
    # 1 ÷ (1 − (1 − 1/2)²) = 4/3
    arrangement = replace(ARRANGEMENT, pipeline=2, microbatches=2)
    assert least_step_seconds(1.0, arrangement) == pytest.approx(4 / 3)


@settings(max_examples=examples(40))
@given(
    few=counts, more=counts, kind=st.sampled_from((ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B))
)
def test_memory_never_falls_when_microbatches_rise(few: int, more: int, kind: ScheduleKind) -> None:
    low, high = sorted((few, more))
    arrangement = replace(ARRANGEMENT, pipeline=4, schedule=kind)
    peaks = [
        predicted([[LAYER]] * 4, replace(arrangement, microbatches=m)).peak_memory.device_bytes
        for m in (low, high)
    ]
    assert peaks[0] <= peaks[1]


def test_thousands_of_microbatches_are_predicted_within_milliseconds() -> None:
    arrangement = replace(ARRANGEMENT, pipeline=16, tensor=8, microbatches=2048)
    cluster = choose_cluster(128, "h100-sxm")
    stages = [[LAYER] * 8] * 16
    taken_seconds = least_seconds(
        lambda: predict(stages, arrangement, cluster, constants=SILENT, model_flops=1)
    )
    assert taken_seconds < 5e-3
