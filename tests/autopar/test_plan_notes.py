"""What a person should know of a plan is told with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan_notes import note_plan
from autopar.planner.plan.declared.constraints import USUAL_MEMORY
from tests.codegen.kinds import plan_of

USUAL = USUAL_MEMORY.share or 0.0


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
