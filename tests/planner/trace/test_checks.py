"""A check that can do nothing but raise is taken as passed; a decision is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        {check}
        return self.linear(x)

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    "check",
    [
        "assert torch.all(x < 9).item(), 'too much'",
        "assert (x < 9).all()",
        "assert not (x > 9).any()",
        "if x.max() >= 9: raise ValueError('too much')",
        "if x is None or x.max() >= 9: raise ValueError('too much')",
        "if not (x < 9).all(): raise ValueError('too much')",
        "torch.distributions.Normal(x, x.abs() + 1)",
    ],
)
def test_a_check_is_taken_as_passed(tmp_path: Path, check: str) -> None:
    assert traced(tmp_path, MODEL.format(check=check)).fixed_batch is None


@pytest.mark.parametrize(
    "decision",
    [
        "x = x + 1 if x.max() >= 9 else x",
        "if x.max() >= 9: x = x + 1",
        "if x.max() < 9 and not x.min() < 0: raise ValueError",
    ],
)
def test_a_decision_on_values_is_refused(tmp_path: Path, decision: str) -> None:
    with pytest.raises(TraceError, match="decides on the values"):
        traced(tmp_path, MODEL.format(check=decision))
