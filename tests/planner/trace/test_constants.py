"""Numbers that a forward makes a tensor of are known, whatever device it asks for."""

from __future__ import annotations

from pathlib import Path

from tests.planner.trace.model_source import traced

SOURCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        least = torch.tensor(-0.25, dtype=y.dtype, device=y.device)
        return torch.where(y > 0, y, least)

def build_model():
    return Model()
"""


def test_a_number_on_the_device_of_an_input_is_known(tmp_path: Path) -> None:
    graph = traced(tmp_path, SOURCE)
    assert [constant.values for constant in graph.constants.values()] == [-0.25]
