"""What a person should know of a plan is told with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan_notes import FULL, note_plan
from tests.codegen.kinds import plan_of


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
