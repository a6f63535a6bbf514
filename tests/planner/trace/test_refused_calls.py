"""Functions that no plan can share are refused where the model calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import TraceError
from tests.planner.trace.model_source import line_of, traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x):
        y = self.linear(x).unsqueeze(1)
        {line}

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("y.sum().backward(retain_graph=True)", "itself runs a backward"),
        (
            "y, _ = self.rnn(nn.utils.rnn.pack_padded_sequence(y, torch.ones(7), True, False))",
            "packs sequences by their lengths",
        ),
        (
            "y = torch.func.functional_call(self.linear, {'weight': self.rnn.weight_hh_l0[:4]}, y)",
            "runs a module with other weights",
        ),
    ],
)
def test_a_function_without_a_part_in_a_plan_is_refused(
    tmp_path: Path, line: str, told: str
) -> None:
    with pytest.raises(TraceError, match=told) as refused:
        traced(tmp_path, MODEL.format(line=f"{line}\n        return y"))
    assert refused.value.where.endswith(f"subject.py:{line_of(tmp_path / 'subject.py', line)}")
