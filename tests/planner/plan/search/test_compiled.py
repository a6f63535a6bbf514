"""Tests of the choice whether layers are compiled."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Recompute
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.errors import InputError
from autopar.planner.layers import Compile, find_layers
from autopar.planner.plan.declared.constraints import Declared, RecomputePin
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.planned import check_fused
from autopar.planner.plan.telling.comparison import seconds_saved_by_fusing
from tests.planner.plan.searches import declared, planned

GPT2 = ("gpt2.py", "size=124m", "layers=2")
SELECTIVE = Declared(
    place="recompute 1",
    field="recompute",
    value=RecomputePin(modules="h.*", mode=Recompute.SELECTIVE),
    text="recompute selective in h.*",
    origin="test",
)


def chosen(device: str, *rules: Declared, **places: Any) -> Plan:
    """Return the plan of a GPT-2 on two devices."""
    return planned(GPT2, choose_cluster(2, device), *rules, global_batch=16, **places)


def test_gpus_compile_layers_because_their_step_is_shorter() -> None:
    either, compiled, eager = (
        chosen("h100-sxm", **places) for places in ({}, {"compile": "layers"}, {"compile": "none"})
    )
    assert either.arrangement.compile is Compile.LAYERS
    assert either.prediction.step_seconds == compiled.prediction.step_seconds
    assert either.prediction.step_seconds < eager.prediction.step_seconds


def test_cpus_compile_layers_only_if_asked_to() -> None:
    assert chosen("cpu").arrangement.compile is Compile.NONE
    assert chosen("cpu", compile="layers").arrangement.compile is Compile.LAYERS


def test_layers_that_must_be_recomputed_in_part_are_not_compiled() -> None:
    assert chosen("h100-sxm", SELECTIVE).arrangement.compile is Compile.NONE


def test_a_pipeline_with_split_backwards_is_not_compiled() -> None:
    pins = {"pins__pp": 2, "pins__schedule": "zero-bubble-v"}
    plan = chosen("h100-sxm", **pins)
    assert SCHEDULES[plan.arrangement.schedule].splits_backward
    assert plan.arrangement.compile is Compile.NONE


def test_fused_messages_are_asked_for_and_priced() -> None:
    llama, cluster = ("llama.py", "size=8b", "layers=2"), choose_cluster(8, "h100-sxm")
    asked: dict[str, Any] = {"global_batch": 8, "pins__tp": 8, "tolerance": 0}
    usual, layers, fused = (
        planned(llama, cluster, **(asked | places))
        for places in ({}, {"compile": "layers"}, {"compile": "fused"})
    )
    assert usual.arrangement.compile is Compile.LAYERS
    axes = infer_axes(fused.graph)
    saved = seconds_saved_by_fusing(fused, axes, find_layers(fused.graph, axes))
    gained = layers.prediction.step_seconds - fused.prediction.step_seconds
    assert fused.arrangement.compile is Compile.FUSED
    assert 0.05 * layers.prediction.step_seconds < gained <= saved * 1.01


def test_fused_messages_have_tensor_ranks_within_a_node() -> None:
    llama, cluster = ("llama.py", "size=8b", "layers=2"), choose_cluster(8, "h100-sxm")
    assert planned(llama, cluster, global_batch=8, compile="fused").arrangement.tensor > 1


def fused_on(device: str, devices: int = 8, **places: Any) -> None:
    check_fused(choose_cluster(devices, device), declared(compile="fused", **places))


@pytest.mark.parametrize(
    ("device", "places", "why"),
    [
        ("cpu", {}, "cpu has no such ops"),
        ("h100-sxm", {"pins__tp": 1}, "one tensor rank"),
        ("h100-sxm", {"limits__tp": 1}, "one tensor rank"),
        ("h100-sxm", {"pins__tp": 16}, "16 tensor ranks are more than the 8 devices of a node"),
    ],
)
def test_messages_that_no_gpu_can_fuse_are_refused(
    device: str, places: dict[str, Any], why: str
) -> None:
    fused_on("h100-sxm")
    with pytest.raises(InputError, match=rf"no messages can be fused with products: {why}"):
        fused_on(device, 16, **places)


def test_fused_messages_exclude_float8_whose_casts_stand_in_between() -> None:
    with pytest.raises(InputError, match=r"float8 tensorwise .* exclude each other"):
        declared(compile="fused", float8="tensorwise")


@pytest.mark.parametrize("tolerance", [0, "50%"])
def test_within_the_tolerance_layers_stay_as_they_are(tolerance: object) -> None:
    llama, cluster = ("llama.py", "size=8b", "layers=1"), choose_cluster(2, "h100-sxm")
    plan = planned(llama, cluster, global_batch=2, pins__dp=2, pins__zero=0, tolerance=tolerance)
    assert (plan.arrangement.compile is Compile.LAYERS) == (tolerance == 0)
