"""What a person should know of a plan is told with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.notes import note_compiling, note_plan, note_rows, note_unaligned, note_unpriced
from autopar.planner.axes.infer import infer_axes
from autopar.planner.cluster.file import choose_cluster
from autopar.planner.layers import find_layers
from autopar.planner.plan.declared.constraints import DEFAULT_MEMORY, Constraints
from autopar.planner.plan.declared.settings import declare
from autopar.planner.trace import trace
from tests.codegen.kinds import plan_of
from tests.planner.plan.searches import planned
from tests.planner.rules.multiplying_models import function
from tests.planner.trace.test_expected_rows import WAYS, graph_of

USUAL = DEFAULT_MEMORY.share or 0.0


@pytest.mark.parametrize(("share", "backend", "is_told"), [
    (USUAL + 0.01, "nccl", True), (USUAL - 0.01, "nccl", False), (USUAL + 0.01, "gloo", False),
])  # fmt: skip
def test_memory_without_room_for_an_error_is_told(
    capsys: pytest.CaptureFixture[str], share: float, backend: str, *, is_told: bool
) -> None:
    plan = plan_of("tp")
    memory_bytes = int(plan.prediction.peak_memory.device_bytes / share)
    machines = replace(plan.machines, memory_bytes=memory_bytes, backend=backend)
    note_plan(replace(plan, machines=machines))
    assert ("the fullest device holds" in capsys.readouterr().err) == is_told


def test_an_op_without_a_formula_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    graph = trace(function(lambda a: torch.i0(a), (4, 4)).file())
    note_unpriced(graph, infer_axes(graph))
    told = " ".join(capsys.readouterr().err.split())
    assert "the FLOPs of aten.i0.default (1 ×" in told
    assert "% of all bytes of a step" in told


def test_an_odd_vocabulary_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    gpt2, cluster = ("gpt2.py", "size=124m"), choose_cluster(1, "h200")
    plan = planned(gpt2, cluster, global_batch=16, compile="none")
    note_unaligned(plan, infer_axes(plan.graph))
    told = " ".join(capsys.readouterr().err.split())
    assert "50,257 is no multiple of 8, so matrix products of that size" in told
    assert "Padded to 50,304, they would take" in told


def test_what_is_expected_of_experts_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note_rows(graph_of(tmp_path, WAYS["each choice"]), Constraints())
    told = " ".join(capsys.readouterr().err.split())
    assert "6 masks divide rows among experts (the first at" in told
    assert "an even share of the rows, 16.7%" in told


def test_layers_that_the_planner_compiles_are_told_with_the_saved_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(("llama.py", "size=tiny"), choose_cluster(2, "h100"), global_batch=16)
    axes = infer_axes(plan.graph)
    layers = find_layers(plan.graph, axes)
    note_compiling(plan, axes, layers)
    told = " ".join(capsys.readouterr().err.split())
    assert "layers are compiled by torch.compile: a step takes" in told
    assert "--compile none leaves layers as they are" in told
    demanded = declare("compile", "layers", origin="--compile", where="--compile")
    note_compiling(replace(plan, constraints=(demanded,)), axes, layers)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("size", "told"), [("8b", "instead of about"), ("tiny", "takes longer")])
def test_what_float8_saves_is_told(
    size: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = ("llama.py", f"size={size}", "layers=2")
    plan = planned(case, choose_cluster(2, "h100"), global_batch=2, float8="tensorwise")
    axes = infer_axes(plan.graph)
    note_compiling(plan, axes, find_layers(plan.graph, axes))
    text = " ".join(capsys.readouterr().err.split())
    assert text.startswith("note: linear layers multiply in float8: a step takes")
    assert told in text
