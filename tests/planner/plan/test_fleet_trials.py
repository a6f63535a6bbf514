"""Several numbers of devices, planned together and each alone; and fewer that are as fast."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.planner.cluster.file import first_devices, parse_cluster, prefix_sizes
from autopar.planner.plan.fleet import Curve, Training, fewer_as_fast, planned_curve
from autopar.planner.plan.plan import Plan
from tests.planner.plan.plans import model, parts_of
from tests.planner.plan.searches import declared, planned

MODEL = ("bert.py", "size=base", "layers=2")
BATCH = 64


def training(**places: object) -> Training:
    graph, axes, layers = parts_of(*MODEL)
    return Training(
        graph=graph,
        axes=axes,
        layers=layers,
        model=model(graph, MODEL[0]),
        constraints=declared(**{"global_batch": BATCH, **places}),
    )


def source(network: str) -> str:
    nodes = '[[nodes]]\ncount = 2\ndevice = "a100-80gb-sxm"\ndevices = 2\n'
    return f'{nodes}[network]\nlike = "{network}"\n'


@cache
def curve(network: str) -> Curve:
    whole = parse_cluster(source(network), where="test")
    clusters = [first_devices(whole, count) for count in prefix_sizes(whole)]
    return planned_curve(training(), clusters)


@cache
def alone(network: str, devices: int, tolerance: str = "3%") -> Plan:
    """Plan a number of devices by itself: no prices shared, a cluster of its own."""
    text = source(network).replace("count = 2", f"count = {max(1, devices // 2)}")
    text = text.replace("devices = 2", "devices = 1") if devices == 1 else text
    cluster = parse_cluster(text, where="test")
    return planned(MODEL, cluster, global_batch=BATCH, tolerance=tolerance)


NETWORKS = ("ethernet-10", "infiniband-hdr")


@pytest.mark.parametrize("network", NETWORKS)
def test_a_curve_has_the_plans_that_each_number_of_devices_has_alone(network: str) -> None:
    for point in curve(network).points:
        by_itself = alone(network, point.devices)
        assert point.plan.arrangement == by_itself.arrangement
        assert point.plan.prediction == by_itself.prediction
        assert point.plan.stages == by_itself.stages
        assert point.plan.layouts == by_itself.layouts


@pytest.mark.parametrize("network", NETWORKS)
def test_the_knee_is_where_each_alone_has_least_cost_times_time(network: str) -> None:
    steps = {count: alone(network, count).prediction.step_seconds for count in (1, 2, 4)}
    knee = min(steps, key=lambda count: count * steps[count] ** 2)
    assert curve(network).knee.devices == knee


def test_the_network_moves_the_knee() -> None:
    assert curve("ethernet-10").knee.devices == 2
    assert curve("infiniband-hdr").knee.devices == 4


@pytest.mark.parametrize("network", NETWORKS)
def test_fewer_devices_are_told_where_they_are_as_fast_and_only_there(network: str) -> None:
    whole = parse_cluster(source(network), where="test")
    plan = alone(network, 4)
    most = plan.prediction.step_seconds * 1.03
    fastest = {count: alone(network, count, "0").prediction.step_seconds for count in (1, 2)}
    as_fast = {count: seconds for count, seconds in fastest.items() if seconds <= most}
    found = fewer_as_fast(training(), whole, plan)
    assert (found is not None) == bool(as_fast)
    if found is not None:
        assert found.devices == min(as_fast, key=lambda count: as_fast[count])
        assert found.step_seconds == pytest.approx(as_fast[found.devices])
    assert bool(as_fast) == (network == "ethernet-10")


def test_without_a_batch_all_numbers_of_devices_train_that_of_the_most() -> None:
    whole = parse_cluster(source("infiniband-hdr"), where="test")
    bare = replace(training(), constraints=declared(limits__pp=1, limits__tp=1))
    found = planned_curve(bare, [first_devices(whole, 1), whole])
    assert {one.plan.arrangement.global_batch for one in found.points} == {8 * 4}


def test_a_number_without_a_plan_is_told_beside_the_others() -> None:
    whole = parse_cluster(source("infiniband-hdr"), where="test")
    clusters = [first_devices(whole, 1), first_devices(whole, 2)]
    found = planned_curve(training(pins__dp=2), clusters)
    assert [one.devices for one in found.points] == [2]
    assert "dp=2" in found.trials[0].refusal
