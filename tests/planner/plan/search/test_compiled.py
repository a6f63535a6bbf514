"""Tests of the choice whether layers are compiled."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.planner.cluster.file import choose_cluster
from autopar.planner.costs.prediction import Compile, Recompute
from autopar.planner.costs.schedules.table import SCHEDULES
from autopar.planner.plan.declared.constraints import Declared, RecomputePin
from autopar.planner.plan.plan import Plan
from tests.planner.plan.searches import planned

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


@pytest.mark.parametrize("tolerance", [0, "50%"])
def test_within_the_tolerance_layers_stay_as_they_are(tolerance: object) -> None:
    llama, cluster = ("llama.py", "size=8b", "layers=1"), choose_cluster(2, "h100-sxm")
    plan = planned(llama, cluster, global_batch=2, pins__dp=2, pins__zero=0, tolerance=tolerance)
    assert (plan.arrangement.compile is Compile.LAYERS) == (tolerance == 0)
