"""Local steps are planned if they are named: what they cost, what they exclude, when they pay."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from autopar.planner.cluster.cluster import Collective
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.cluster.shape import group_shape
from autopar.planner.costs.collectives.choice import collective_seconds
from autopar.planner.costs.prediction import Arrangement, Offload, Prediction, Zero
from autopar.planner.costs.steps.state import loses_unkept
from autopar.planner.costs.steps.step import predict
from autopar.planner.errors import AutoparError, InfeasibleError, InputError
from autopar.planner.graph.ops import Buffer
from autopar.planner.plan.declared.constraints import local_steps
from autopar.planner.plan.declared.limits import with_local_steps
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import arrangement_words, meaning_notes
from autopar.planner.precision import LEARNT, Allowed, Compression, Outer
from tests.planner.costs.step_factories import ARRANGEMENT, LAYER, SILENT
from tests.planner.plan.searches import declared, planned, two_nodes
from tests.planner.subjects import zoo_graph

ROOT = Path(__file__).parents[4]
GPT2 = ("gpt2.py", "size=124m", "layers=2")
LOCAL = replace(ARRANGEMENT, data=4, shard=2, sync_every=8, outer=Outer.NESTEROV)


def predicted(arrangement: Arrangement) -> Prediction:
    cluster = choose_cluster(arrangement.ranks, "h100-sxm")
    return predict([[LAYER]], arrangement, cluster, constants=SILENT, model_flops=10**15)


def test_a_local_step_has_its_share_of_an_outer_step() -> None:
    # One million parameters: 4 MB over two replicas, and 120 bytes for each at 0.9 · 3.35 TB/s.
    outer = next(one for one in predicted(LOCAL).terms if one.name == "outer step").seconds
    two = group_shape(choose_cluster(4, "h100-sxm"), 2, 2)
    sent = collective_seconds(Collective.ALL_REDUCE, 4_000_000, two)
    assert outer == pytest.approx((sent + 120e6 / (0.9 * 3.35e12)) / 8, rel=1e-3)


@pytest.mark.parametrize("network", ["infiniband-ndr", "ethernet-10"])
def test_parts_are_sent_beside_local_steps_as_far_as_these_last(network: str) -> None:
    # Each of 4 parts has 10 MB, and 2 local steps, in the first of which it is sent.
    cluster = two_nodes(network, devices=2, device="h100-sxm")
    layer = replace(LAYER, gradient_bytes=40_000_000)
    parts = replace(LOCAL, outer_parts=4)
    found = predict([[layer]], parts, cluster, constants=SILENT, model_flops=10**15)
    outer = next(one.seconds for one in found.terms if one.name == "outer step")
    sent = 4 * collective_seconds(Collective.ALL_REDUCE, 10_000_000, group_shape(cluster, 2, 2))
    hidden = min(sent, 4 * (found.step_seconds - outer))
    assert outer == pytest.approx((1200e6 / (0.9 * 3.35e12) + sent - hidden) / 8, rel=1e-3)
    assert (hidden == sent) == (network == "infiniband-ndr")
    told = next(one for one in found.communication if one.reason.startswith("parameters averaged"))
    assert told.seconds - told.exposed_seconds == pytest.approx(hidden / 8)
    assert found.outer_delay == 1


def test_a_part_is_sent_for_as_many_steps_as_that_takes() -> None:
    cluster = two_nodes("ethernet-10", devices=2, device="h100-sxm")
    layer = replace(LAYER, gradient_bytes=400_000_000)
    parts = replace(LOCAL, outer_parts=4, sync_every=256)
    found = predict([[layer]], parts, cluster, constants=SILENT, model_flops=10**15)
    each = collective_seconds(Collective.ALL_REDUCE, 100_000_000, group_shape(cluster, 2, 2))
    assert found.outer_delay == ceil(each / found.step_seconds) > 1


def test_gradients_are_averaged_inside_a_replica() -> None:
    inside = replace(ARRANGEMENT, data=2, shard=2)
    for term in ("compute", "exposed data parallel", "optimizer"):
        local, alone = (
            next(one.seconds for one in predicted(x).terms if one.name == term)
            for x in (LOCAL, inside)
        )
        assert local == pytest.approx(alone)


@pytest.mark.parametrize(
    ("outer", "zero", "more"),
    [
        (Outer.NESTEROV, Zero.NONE, 8_000_000),  # the common parameters and a momentum, in fp32
        (Outer.AVERAGE, Zero.NONE, 4_000_000),
        (Outer.NESTEROV, Zero.OPTIMIZER, 4_000_000),  # of each rank's half
    ],
)
def test_memory_has_the_outer_state(outer: Outer, zero: Zero, more: int) -> None:
    local = replace(LOCAL, outer=outer, zero=zero)
    alone = replace(local, data=2, sync_every=1, outer=Outer.NONE)
    in_parts = predicted(replace(local, outer_parts=4)).peak_memory.optimizer_bytes
    on_its_way = in_parts - predicted(local).peak_memory.optimizer_bytes
    assert on_its_way == 2_000_000 // (2 if zero is Zero.OPTIMIZER else 1)  # half of 4 MB
    bytes_ = [predicted(one).peak_memory.optimizer_bytes for one in (local, alone)]
    assert bytes_[0] - bytes_[1] == more


@pytest.mark.parametrize(("parts", "copies"), [(1, 3), (4, 5)])
def test_an_outer_optimizer_on_the_host_takes_its_seconds_and_bytes_there(
    parts: int, copies: int
) -> None:
    # One million parameters: SGD moves 44 bytes of each in the host's memory, and 4 bytes cross its
    # link 3 times, or 5 times if the parameters of a part on its way are kept there, too.
    here = replace(LOCAL, outer_parts=parts)
    there, moved = predicted(replace(here, offload=Offload.OUTER)), predicted(here)
    host = choose_cluster(4, "h100-sxm").nodes[0].device.host
    memory = host.memory_bytes_per_second * SILENT.host_memory_share
    link = host.bytes_per_second * SILENT.host_link_share
    more = 44e6 / memory + copies * 4e6 / link - 44e6 / (0.9 * 3.35e12)
    seconds = [
        sum(one.seconds for one in x.terms if one.name == "outer step") for x in (there, moved)
    ]
    assert seconds[0] - seconds[1] == pytest.approx(more / 8, rel=1e-3)
    # 8 bytes of each leave the device; and of a quarter of the model, what was sent: 1 MB
    on_host = 8_000_000 + 1_000_000 * (parts > 1)
    assert there.peak_memory.host_bytes == on_host
    assert moved.peak_memory.host_bytes == 0
    left = moved.peak_memory.optimizer_bytes - there.peak_memory.optimizer_bytes
    assert left == on_host


def test_the_outer_optimizer_moves_to_the_host_where_nothing_else_fits() -> None:
    pinned: dict[str, Any] = {
        "choices__sync_every": 64,
        "pins__zero": 0,
        "pins__tp": 1,
        "pins__pp": 1,
    }
    here = found(SLOW, **pinned, offload="none", objective="memory")
    below = here.prediction.peak_memory.device_bytes - 300 * 2**20  # of 409 that it has
    assert found(SLOW, **pinned).arrangement.offload is Offload.NONE
    plan = found(SLOW, **pinned, limits__memory=f"{below} B")
    assert plan.arrangement.offload is Offload.OUTER
    assert "outer optimizer on the host" in arrangement_words(plan.arrangement)
    tight = {"limits__memory": f"{below} B", "limits__host_memory": "1 MiB"}
    with pytest.raises(AutoparError, match=r"the outer optimizer .*on the host, which then needs"):
        found(SLOW, **pinned, **tight)


def test_an_outer_optimizer_on_the_host_needs_local_steps() -> None:
    with pytest.raises(AutoparError, match="offload outer") as raised:
        found(SLOW, offload="outer")
    assert "local steps of several replicas" in raised.value.expected
    assert found(SLOW, offload="outer", choices__allow="local-steps").arrangement.is_local


def found(network: str, **places: Any) -> Plan:
    return planned(GPT2, two_nodes(network, devices=2), global_batch=32, **places)


SLOW, FAST = "ethernet-10", "infiniband-ndr"


def test_nobody_gets_local_steps_unasked() -> None:
    assert not found(SLOW).arrangement.is_local


def test_allowed_local_steps_are_taken_where_they_pay() -> None:
    slow = found(SLOW, choices__allow="local-steps")
    assert slow.arrangement.is_local
    assert slow.arrangement.shard == 2  # a replica is a node
    assert slow.prediction.step_seconds < 0.7 * found(SLOW).prediction.step_seconds
    fast = found(FAST, choices__allow="local-steps", tolerance="10%")
    assert not fast.arrangement.is_local


def test_demanded_local_steps_are_taken_everywhere() -> None:
    plan = found(FAST, choices__sync_every=100, choices__outer="average")
    assert (plan.arrangement.sync_every, plan.arrangement.outer) == (100, Outer.AVERAGE)
    assert "100 local steps (average)" in arrangement_words(plan.arrangement)
    assert any("not the training of one device" in note for note in meaning_notes(plan))


def test_demanded_sharding_shards_in_replicas_of_a_part_of_a_node() -> None:
    one_node = choose_cluster(4, "a100-80gb-sxm")
    plan = planned(GPT2, one_node, choices__sync_every=8, pins__zero=3, global_batch=8)
    assert plan.arrangement.zero is Zero.PARAMETERS
    assert 1 < plan.arrangement.shard < plan.arrangement.data
    with pytest.raises(InfeasibleError, match="no plan satisfies"):  # no replica has two devices
        planned(
            GPT2, choose_cluster(2, "a100-80gb-sxm"), choices__sync_every=8, pins__zero=3,
            global_batch=8,
        )  # fmt: skip


def test_lossy_gradients_are_told_with_what_small_models_have_learnt() -> None:
    plan = found(FAST, choices__compressed_gradients="powersgd", pins__dp=4)
    (note,) = [one for one in meaning_notes(plan) if "gradients" in one]
    assert "by PowerSGD, as was allowed" in note
    assert "1.6226 instead of 1.5199 (gpt2)" in note


# the columns of the docs' tables: as it is, and with a choice
COLUMNS = {
    Compression.INT8: ("as it is", "int8"),
    Compression.POWERSGD: ("as it is", "PowerSGD"),
    Outer.NESTEROV: ("every step", "50 local steps, Nesterov"),
    Outer.AVERAGE: ("every step", "50 local steps, averaged"),
}


@pytest.mark.parametrize("choice", LEARNT)
def test_losses_that_are_told_are_those_of_the_docs(choice: Compression | Outer) -> None:
    lines = (ROOT / "docs" / "slow-networks.md").read_text(encoding="utf-8").splitlines()
    tables = [list(map(cells, group)) for is_row, group in groupby(lines, is_of_table) if is_row]
    (table,) = [
        one for one in tables if "loss" in " ".join(one[0]) and COLUMNS[choice][1] in one[0]
    ]
    places = [table[0].index(name) for name in COLUMNS[choice]]
    shown = {row[0]: tuple(row[place] for place in places) for row in table[2:]}
    assert {name: (f"{whole:.4f}", f"{own:.4f}") for name, whole, own in LEARNT[choice]} == {
        name: pair for name, pair in shown.items() if "not run" not in pair
    }


def is_of_table(line: str) -> bool:
    return line.startswith("|")


def cells(line: str) -> list[str]:
    return [one.strip() for one in line.strip("|").split("|")]


def test_demanded_parts_are_printed_and_told() -> None:
    plan = found(SLOW, choices__sync_every=100, choices__outer_parts=4)
    assert plan.arrangement.outer_parts == 4
    assert "100 local steps (nesterov, 4 parts)" in arrangement_words(plan.arrangement)
    delay = f"4 parts have outer steps in turn, each sent during {plan.prediction.outer_delay}"
    assert any(delay in note for note in meaning_notes(plan))
    whole = found(SLOW, choices__sync_every=100).prediction.step_seconds
    assert plan.prediction.step_seconds < whole


def test_parts_need_local_steps_of_their_own() -> None:
    with pytest.raises(InputError, match=r"7 local steps .* each part needs 2 local steps"):
        declared(choices__outer_parts=4, choices__sync_every=7)
    allowed = declared(choices__outer_parts=40, choices__allow="local-steps")
    assert local_steps(allowed) == (1, 80)


def test_local_steps_need_several_replicas() -> None:
    with pytest.raises(AutoparError, match="100 local steps") as raised:
        found(SLOW, choices__sync_every=100, pins__dp=1)
    assert "more data ranks" in raised.value.fix
    with pytest.raises(AutoparError, match="100 local steps"):
        found(SLOW, choices__sync_every=100, pins__shard=4, pins__dp=4)


@pytest.mark.parametrize(
    "rival",
    [
        {"precision": "fp16"},
        {"offload": "optimizer"},
        {"choices__compressed_gradients": "int8"},
    ],
)
def test_what_excludes_local_steps_is_told(rival: dict[str, str]) -> None:
    with pytest.raises(InputError, match="exclude each other"):
        declared(choices__sync_every=10, **rival)
    allowed = declared(choices__allow="local-steps", **rival)  # the search leaves them out
    assert allowed.allowed == (Allowed.LOCAL_STEPS,)


def test_no_replica_compresses_gradients_that_local_steps_leave_to_it() -> None:
    several = replace(LOCAL, zero=Zero.NONE)
    lossy = {one for one in Compression if one.keeps_lost}
    assert {c for c in Compression if loses_unkept(replace(several, compression=c))} == lossy
    assert not any(loses_unkept(replace(several, sync_every=1, compression=c)) for c in lossy)


def test_a_model_that_writes_other_buffers_has_no_local_steps() -> None:
    graph = zoo_graph("gpt2.py")
    buffer = Buffer(name="seen", shape=(), dtype="float32", persistent=True, updated=True)
    writing = replace(graph, buffers=(*graph.buffers, buffer))
    allowed = declared(choices__allow="local-steps", global_batch=8)
    assert with_local_steps(allowed, writing).allowed == ()
    assert with_local_steps(allowed, graph) is allowed
    with pytest.raises(AutoparError, match="the buffer seen different"):
        with_local_steps(declared(choices__sync_every=10, global_batch=8), writing)
