"""Overlap of computing and communicating, with numbers worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.shape import GroupShape
from autopar.planner.costs.steps.overlap import (
    LayerLoad,
    Overlapped,
    Seconds,
    bucketed_reduction,
    buckets,
    forward_during_gather,
    gathered_after_optimizer_seconds,
    largest_bucket,
    sharded_backward,
    sharded_forward,
    summing,
)
from autopar.planner.precision import Compression


def linear_seconds(*, alpha_seconds: float, bytes_per_second: float) -> Seconds:
    return lambda size_bytes: alpha_seconds + size_bytes / bytes_per_second if size_bytes else 0.0


def one_second_per_byte(size_bytes: float) -> float:
    return size_bytes


def free(_: float) -> float:
    return 0.0


def layer(
    *, forward: float = 0.0, backward: float = 0.0, parameters: float = 0.0, gradients: float = 0.0
) -> LayerLoad:
    return LayerLoad(
        forward_seconds=forward,
        backward_seconds=backward,
        parameter_bytes=parameters,
        gradient_bytes=gradients,
    )


LAYERS = st.lists(
    st.builds(
        LayerLoad,
        forward_seconds=st.floats(0.0, 10.0),
        backward_seconds=st.floats(0.0, 10.0),
        parameter_bytes=st.floats(0.0, 10.0),
        gradient_bytes=st.floats(0.0, 10.0),
    ),
    min_size=1,
    max_size=8,
)
SLOWDOWN = st.floats(0.0, 0.5)


def all_overlaps(layers: list[LayerLoad], slowdown: float) -> list[Overlapped]:
    wire = one_second_per_byte
    return [
        bucketed_reduction(layers, wire, bucket_bytes=5, slowdown=slowdown),
        sharded_forward(layers, wire, slowdown=slowdown),
        sharded_backward(layers, wire, wire, slowdown=slowdown),
        forward_during_gather(layers, wire, slowdown=slowdown),
    ]


def test_hsdp_sums_over_replicas_only_the_own_shard() -> None:
    # reduce-scatter of 40 bytes at 10 per second, then all-reduce of 40 / 4 at 2 per second
    rates = {Collective.REDUCE_SCATTER: 10, Collective.ALL_REDUCE: 2}
    seconds = summing(
        lambda one, _: linear_seconds(alpha_seconds=0, bytes_per_second=rates[one]),
        GroupShape(ranks=4, crossings=()),
        GroupShape(ranks=2, crossings=()),
        Compression.NONE,
    )
    assert seconds(40) == 4 + 5


def test_buckets_fill_from_the_last_layer_and_wait_for_each_other() -> None:
    # backwards end at 1, 3, 6, 7 (from the last layer); gradients 3, 1, 4, 2; buckets of 4 bytes:
    # {3, 1} reduced 3-7, {4} ready at 6 reduced 7-11, the rest {2} ready at 7 reduced 11-13
    layers = [
        layer(backward=1, gradients=2),
        layer(backward=3, gradients=4),
        layer(backward=2, gradients=1),
        layer(backward=1, gradients=3),
    ]
    result = bucketed_reduction(layers, one_second_per_byte, bucket_bytes=4, slowdown=0)
    assert result.total_seconds == 13
    assert result.exposed_seconds == 13 - 7
    assert result.compute_seconds == 7
    assert result.communication_seconds == 10


def test_reductions_slow_the_computing_beside_them() -> None:
    # last layer 0-1; its reduction 1-4, and beside it at slowdown 1/2 computing does 2 s of its 4;
    # the other 2 s take 4-6; the second reduction is exposed, 6-9. Alone 5 + 3
    layers = [layer(backward=4, gradients=3), layer(backward=1, gradients=3)]
    result = bucketed_reduction(layers, one_second_per_byte, bucket_bytes=3, slowdown=0.5)
    assert result.slowdown_seconds == pytest.approx(1)
    assert result.exposed_seconds == pytest.approx(3)
    assert result.total_seconds == pytest.approx(9)


def test_one_bucket_for_all_gradients_overlaps_nothing() -> None:
    layers = [layer(backward=1, gradients=2)] * 3
    result = bucketed_reduction(layers, one_second_per_byte, bucket_bytes=100, slowdown=0.3)
    assert result.exposed_seconds == 6
    assert result.slowdown_seconds == 0


def test_a_sharded_forward_exposes_the_first_gather_and_what_a_layer_cannot_hide() -> None:
    # G = 2, 5, 1; forwards 3, 4, 1: 2 + max(3, 5) + max(4, 1) + 1
    layers = [
        layer(forward=3, parameters=2),
        layer(forward=4, parameters=5),
        layer(forward=1, parameters=1),
    ]
    result = sharded_forward(layers, one_second_per_byte, slowdown=0)
    assert result.total_seconds == 2 + 5 + 4 + 1
    assert result.exposed_seconds == 12 - 8


def test_a_sharded_forward_is_slowed_while_it_gathers_ahead() -> None:
    # G = 1, 3; layer 0 of 4 s from 1: until 4 beside the gather, 2 s done; the rest until 6; then 5
    layers = [layer(forward=4, parameters=1), layer(forward=5, parameters=3)]
    result = sharded_forward(layers, one_second_per_byte, slowdown=0.5)
    assert result.slowdown_seconds == pytest.approx(1)
    assert result.total_seconds == pytest.approx(11)


def test_a_sharded_backward_gathers_ahead_and_scatters_behind() -> None:
    # from the last layer: gather 1 (0-1), backward 4 (1-5) beside the gather of 2 (1-3);
    # backward 3 (5-8) beside its scatter of 1 (5-6) and the gather of 3 (6-9): waits until 9;
    # backward 2 (9-11) beside the scatter of 2 (9-11); the last scatter of 3 is exposed, 11-14
    layers = [
        layer(backward=2, parameters=3, gradients=3),
        layer(backward=3, parameters=2, gradients=2),
        layer(backward=4, parameters=1, gradients=1),
    ]
    result = sharded_backward(layers, one_second_per_byte, one_second_per_byte, slowdown=0)
    assert result.total_seconds == 14
    assert result.exposed_seconds == 1 + 1 + 3
    assert result.communication_seconds == 12


def test_parameters_kept_whole_leave_only_the_scatters() -> None:
    # reshard_after_forward=False: backwards 0-1, 1-2, 2-3 without a wait; scatters 1-3, 3-5, 5-7
    layers = [layer(backward=1, parameters=9, gradients=2)] * 3
    result = sharded_backward(layers, free, one_second_per_byte, slowdown=0)
    assert result.total_seconds == 7
    # backwards of 5 s hide all but the last: 15 + 2
    layers = [layer(backward=5, parameters=9, gradients=2)] * 3
    result = sharded_backward(layers, free, one_second_per_byte, slowdown=0)
    assert result.total_seconds == 17


def test_parameters_gathered_after_the_optimizer_are_exposed_by_the_bucket() -> None:
    # {3, 2} and {1} with α = 1 s: 6 + 2
    layers = [layer(parameters=3), layer(parameters=2), layer(parameters=1)]
    wire = linear_seconds(alpha_seconds=1, bytes_per_second=1)
    assert gathered_after_optimizer_seconds(layers, wire, bucket_bytes=4) == 8


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 80))
def test_the_largest_bucket_is_the_largest_first_one_of_all_layers_to_begin_with(
    layers: list[int], bucket_bytes: int
) -> None:
    firsts = (next(buckets(layers[i:], bucket_bytes), 0.0) for i in range(len(layers)))
    assert largest_bucket(layers, bucket_bytes) == max(firsts)


def test_a_forward_during_the_gather_waits_for_its_own_layer() -> None:
    # gathers until 3, 5 and 6; forwards 3-3.25, 5-5.25 and 6-8
    layers = [
        layer(forward=0.25, parameters=3),
        layer(forward=0.25, parameters=2),
        layer(forward=2, parameters=1),
    ]
    result = forward_during_gather(layers, one_second_per_byte, slowdown=0)
    assert result.total_seconds == 8
    assert result.exposed_seconds == 5.5


@given(LAYERS, SLOWDOWN)
def test_both_streams_fit_into_the_total(layers: list[LayerLoad], slowdown: float) -> None:
    for result in all_overlaps(layers, slowdown):
        assert result.exposed_seconds >= -1e-9
        assert result.total_seconds >= result.compute_seconds - 1e-9
        assert result.total_seconds >= result.communication_seconds - 1e-9
        in_turn = result.compute_seconds + result.communication_seconds
        assert result.total_seconds <= in_turn + 1e-9


@given(LAYERS, SLOWDOWN)
def test_computing_is_slowed_for_no_longer_than_collectives_run(
    layers: list[LayerLoad], slowdown: float
) -> None:
    for result in all_overlaps(layers, slowdown):
        assert result.slowdown_seconds <= slowdown * result.communication_seconds + 1e-9
        assert result.slowdown_seconds <= slowdown * result.compute_seconds + 1e-9


@given(LAYERS)
def test_the_sum_of_maxima_is_a_sharded_forward_without_slowdown(layers: list[LayerLoad]) -> None:
    gathers = [one.parameter_bytes for one in layers[1:]] + [0.0]
    by_formula = layers[0].parameter_bytes + sum(
        max(one.forward_seconds, gather) for one, gather in zip(layers, gathers, strict=True)
    )
    result = sharded_forward(layers, one_second_per_byte, slowdown=0)
    assert result.total_seconds == pytest.approx(by_formula)


@given(LAYERS)
def test_the_sum_of_maxima_is_a_sharded_backward_where_every_layer_gathers(
    layers: list[LayerLoad],
) -> None:
    order = [replace(one, parameter_bytes=one.parameter_bytes + 1) for one in reversed(layers)]
    gathers = [one.parameter_bytes for one in order[1:]] + [0.0]
    scatters = [0.0] + [one.gradient_bytes for one in order[:-1]]
    by_formula = order[0].parameter_bytes + order[-1].gradient_bytes
    for one, gather, scatter in zip(order, gathers, scatters, strict=True):
        by_formula += max(one.backward_seconds, gather + scatter)
    wire = one_second_per_byte
    result = sharded_backward(order[::-1], wire, wire, slowdown=0)
    assert result.total_seconds == pytest.approx(by_formula)
