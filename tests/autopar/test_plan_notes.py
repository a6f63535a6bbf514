"""What a person should know of a plan is told with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.plan_notes import FULL, note_plan, note_unpriced
from autopar.planner.axes.infer import infer_axes
from autopar.planner.trace import trace
from tests.codegen.kinds import plan_of
from tests.planner.rules.multiplying_models import function


@pytest.mark.parametrize(("share", "backend", "is_told"), [
    (FULL + 0.01, "nccl", True), (FULL - 0.01, "nccl", False), (FULL + 0.01, "gloo", False),
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
    graph = trace(function(torch.kron, (4, 4), (5, 5)).file())
    note_unpriced(graph, infer_axes(graph))
    told = " ".join(capsys.readouterr().err.split())
    assert "what aten.kron.default computes (1 ×" in told
    assert "% of all that a step moves" in told
