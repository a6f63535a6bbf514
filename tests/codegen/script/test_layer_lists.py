"""Which stage holds which tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autopar.codegen.script.layer_lists import stage_holds
from tests.planner.trace.model_source import traced

MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.weighing = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.last(self.first(x)), self.weighing

    def build_model():
        return Model()

    def loss(outputs, batch):
        made, weighing = outputs
        return (weighing.exp() * made.square().mean()).sum()
"""


def test_the_last_stage_holds_a_parameter_that_is_only_returned(tmp_path: Path) -> None:
    stages: list[Any] = [
        SimpleNamespace(parameters={f"{name}.weight", f"{name}.bias"}, modules={name})
        for name in ("first", "last")
    ]
    first, last = stage_holds(traced(tmp_path, MODEL), stages)
    assert first == {"first.weight", "first.bias"}
    assert last == {"last.weight", "last.bias", "weighing"}
