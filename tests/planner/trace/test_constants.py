"""Numbers that a forward makes a tensor of are known, whatever device it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.trace.model_source import traced

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        least = {least}
        return torch.where(y > 0, y, least)

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    "least",
    [
        "torch.tensor(-0.25, dtype=y.dtype, device=y.device)",
        "torch.as_tensor(-0.25, device=y.device).to(y)",
        "torch.asarray(-0.25, dtype=y.dtype, device=y.device)",
        "y.new_tensor(-0.25)",
    ],
)
def test_a_number_on_the_device_of_an_input_is_known(tmp_path: Path, least: str) -> None:
    graph = traced(tmp_path, SOURCE.format(least=least))
    assert [constant.values for constant in graph.constants.values()] == [-0.25]
