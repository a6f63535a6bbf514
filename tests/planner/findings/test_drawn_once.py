"""Numbers that one device draws once in a step are told where a plan splits the batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.findings.rows import drawn_once
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.telling.words import draws_apart
from autopar.planner.trace import trace
from tests.codegen.plans import pinned_plan, plan_for
from tests.planner.subjects import zoo_graph

# As a file of its own: of this one, all files that it imports would be read for each trace.
MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Noisy(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.way = way

    def forward(self, x):
        y = functional.dropout(self.up(x), 0.1, self.training)
        match self.way:
            case "a switch":
                y = y * (torch.rand(()) < 0.9)
            case "noise":
                y = y + torch.randn(16)
            case "a weight":
                return functional.linear(y, functional.dropout(self.down.weight, 0.1)).mean()
        return torch.as_tensor(self.down(y)).mean()


def build_model(way: str):
    return Noisy(way)


def example_batch(batch_size):
    return {"x": torch.zeros(batch_size, 8)}
"""


def noisy(way: str, folder: Path) -> ModelFile:
    path = folder / "noisy.py"
    path.write_text(MODEL, encoding="utf-8")
    return load_model_file(str(path), [f"way={way}"])


@pytest.mark.parametrize(
    ("way", "op"), [("a switch", "rand"), ("noise", "randn"), ("a weight", "dropout")]
)
def test_numbers_for_all_rows_together_are_told_of_a_batch_in_parts(
    way: str, op: str, tmp_path: Path
) -> None:
    file = noisy(way, tmp_path)
    graph = trace(file)
    found = drawn_once(graph)
    assert found is not None
    assert found.target.startswith(f"aten.{op}")
    whole, parts = (
        plan_for(file, graph, (), degrees=(1, 1, 1), microbatch=rows) for rows in (8, 4)
    )
    assert draws_apart(whole) == ""
    assert "here each microbatch of each data rank draws its own" in draws_apart(parts)


def test_what_each_row_draws_for_itself_is_not_told(tmp_path: Path) -> None:
    assert drawn_once(trace(noisy("its own", tmp_path))) is None
    assert drawn_once(zoo_graph("gpt2.py")) is None
    assert draws_apart(pinned_plan("gpt2.py", ("layers=4",), data=2, microbatch=2)) == ""
