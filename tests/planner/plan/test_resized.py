"""What is demanded of a plan for another number of devices, and on which machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.cluster.cluster import Unit
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.sheet import known_fabrics
from autopar.planner.costs.prediction import Recompute
from autopar.planner.errors import InputError
from autopar.planner.plan.again import machines_like, resized_constraints
from autopar.planner.plan.declared.constraints import Declared, RecomputePin, StagePin
from autopar.planner.plan.declared.settings import declare
from autopar.planner.plan.plan import Plan
from autopar.planner.precision import Precision
from tests.codegen.plans import pinned_plan


def planned(**declared: object) -> Plan:
    """Return a plan with a batch of 8 in fp32, and what was declared, by its place."""
    demands = tuple(
        declare(place.replace("__", "."), value, origin="--pin", where="")
        for place, value in declared.items()
    )
    return replace(pinned_plan("mnist.py", (), microbatch=4), constraints=demands)


def texts(dropped: tuple[Declared, ...]) -> list[str]:
    return [one.text for one in dropped]


def test_batch_and_precision_stay_though_nobody_declared_them() -> None:
    found = resized_constraints(planned(), 3)
    assert found.constraints.global_batch == 8
    assert found.constraints.precision is Precision.FP32
    assert not found.dropped


@pytest.mark.parametrize(
    ("devices", "declared", "dropped"),
    [
        (4, {"pins__tp": 2, "pins__dp": 2}, []),
        (1, {"pins__dp": 2}, ["dp=2"]),
        (4, {"pins__tp": 4, "pins__dp": 2}, ["dp=2"]),  # tensor ranks save memory
        (2, {"pins__tp": 4, "pins__dp": 2}, ["tp=4"]),
        (16, {"pins__tp": 4, "pins__dp": 2, "pins__pp": 1}, ["dp=2"]),  # more of them
        (1, {"pins__zero": 3}, ["zero=3"]),  # there is nobody to share with
        (2, {"pins__zero": 3, "limits__pp": 4}, []),
        (1, {"pins__shard": 2}, ["shard=2"]),
        (1, {"pins__stages_per_rank": 2, "pins__schedule": "1f1b"}, ["stages_per_rank=2"]),
        (16, {"limits__tp": 1, "limits__pp": 2, "pins__microbatch": 8}, ["microbatch=8"]),
        (2, {"deadline": "3 days", "samples": 10**6}, ["a deadline of 3 days"]),
        (2, {"limits__memory": "1 GiB", "pins__schedule": "gpipe"}, []),
    ],
)
def test_demands_that_do_not_fit_are_dropped_and_others_stay(
    devices: int, declared: dict[str, object], dropped: list[str]
) -> None:
    plan = planned(**declared)
    found = resized_constraints(plan, devices)
    assert texts(found.dropped) == dropped
    left = [one.text for one in found.constraints.declared]
    assert set(left) >= {one.text for one in plan.constraints} - set(dropped)


def test_what_is_no_pin_of_degrees_is_left_for_the_search_to_refuse() -> None:
    found = resized_constraints(planned(limits__tp=1, limits__pp=1), 3)  # dp=3 of 8 rows
    assert not found.dropped
    assert (found.constraints.max_tensor, found.constraints.max_pipeline) == (1, 1)


def test_a_stage_that_is_gone_is_dropped_and_other_rules_stay() -> None:
    demands = (
        _rule("stages 1", "stages", StagePin(modules="hidden.0", stage=0)),
        _rule("stages 2", "stages", StagePin(modules="out", stage=1)),
        _rule("recompute 1", "recompute", RecomputePin(modules="*", mode=Recompute.FULL)),
    )
    plan = replace(planned(), constraints=demands)
    assert not resized_constraints(plan, 2).dropped
    found = resized_constraints(plan, 1)
    assert [one.place for one in found.dropped] == ["stages 2"]
    assert found.constraints.recompute


def _rule(place: str, field: str, value: StagePin | RecomputePin) -> Declared:
    return Declared(place=place, field=field, value=value, text=place, origin="rules.toml")


def test_one_machine_has_devices_of_the_same_kind_and_links() -> None:
    plan = replace(planned(), cluster=choose_cluster(16, "a100-80gb-sxm"))
    for devices in (1, 3, 8, 16):
        made = machines_like(plan, devices)
        assert (len(made.nodes), made.size) == (1, devices)
        assert replace(made.nodes[0], devices=8) == plan.cluster.nodes[0]


@pytest.mark.parametrize("planned_for", [8, 16])
def test_several_machines_are_joined_by_the_network(planned_for: int) -> None:
    plan = replace(planned(), cluster=choose_cluster(planned_for, "a100-80gb-sxm"))
    made = machines_like(plan, 8, 2)
    assert [node.devices for node in made.nodes] == [4, 4]
    assert made.levels[-1] == replace(
        choose_cluster(16, "a100-80gb-sxm").levels[-1],
        units=(Unit(ranks=8, link=known_fabrics()["infiniband-hdr"]),),
    )


def test_of_unlike_machines_nobody_knows_which_is_left() -> None:
    large, small = choose_cluster(8, "h100-sxm"), choose_cluster(8, "a100-80gb-sxm")
    unlike = replace(large, nodes=large.nodes + small.nodes)
    with pytest.raises(InputError, match="unlike machines"):
        machines_like(replace(planned(), cluster=unlike), 8)
