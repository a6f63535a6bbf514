"""A parameter that is a single number is not cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.costs.prediction import Zero
from autopar.planner.errors import InfeasibleError
from autopar.planner.plan.declared.limits import with_whole_scalars
from tests.planner.plan.searches import declared
from tests.planner.subjects import zoo_graph
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.linear(x) * self.gate.tanh()

def build_model():
    return Model()
"""


def test_levels_that_cut_parameters_are_left_out(tmp_path: Path) -> None:
    found = with_whole_scalars(declared(global_batch=8), traced(tmp_path, MODEL))
    assert found.zero_levels == (Zero.NONE, Zero.OPTIMIZER)


@pytest.mark.parametrize("level", [2, 3])
def test_who_asks_for_them_is_told_which_parameter(tmp_path: Path, level: int) -> None:
    graph = traced(tmp_path, MODEL)
    with pytest.raises(InfeasibleError, match="gate has no dim") as told:
        with_whole_scalars(declared(global_batch=8, pins__zero=level), graph)
    assert "zero=1" in told.value.fix


def test_models_of_wider_parameters_keep_all_levels() -> None:
    constraints = declared(global_batch=8)
    assert with_whole_scalars(constraints, zoo_graph("gpt2.py")) is constraints
