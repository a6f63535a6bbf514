"""Numbers that one device draws once in a step are told where a plan splits the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.findings.rows import drawn_once
from autopar.planner.model.model_file import ModelFile
from autopar.planner.plan.telling.words import draws_apart
from autopar.planner.trace import trace
from tests.codegen.plans import pinned_plan, plan_for
from tests.planner.subjects import zoo_graph


class Noisy(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(self.up(x), 0.1, self.training)
        match self.way:
            case "a switch":
                y = y * (torch.rand(()) < 0.9)
            case "noise":
                y = y + torch.randn(16)
            case "a weight":
                return functional.linear(y, functional.dropout(self.down.weight, 0.1)).mean()
        return torch.as_tensor(self.down(y)).mean()


def noisy(way: str) -> ModelFile:
    return ModelFile(
        path=Path(__file__),
        factory="build_model",
        arguments=(),
        build_model=lambda: Noisy(way),
        example_batch=lambda batch_size: {"x": torch.zeros(batch_size, 8)},
        loss=None,
        build_dataset=None,
        build_optimizer=None,
        build_scheduler=None,
    )


@pytest.mark.parametrize(
    ("way", "op"), [("a switch", "rand"), ("noise", "randn"), ("a weight", "dropout")]
)
def test_numbers_for_all_rows_together_are_told_of_a_batch_in_parts(way: str, op: str) -> None:
    graph = trace(noisy(way))
    found = drawn_once(graph)
    assert found is not None
    assert found.target.startswith(f"aten.{op}")
    whole, parts = (
        plan_for(noisy(way), graph, (), degrees=(1, 1, 1), microbatch=rows) for rows in (8, 4)
    )
    assert draws_apart(whole) == ""
    assert "here each microbatch of each data rank draws its own" in draws_apart(parts)


def test_what_each_row_draws_for_itself_is_not_told() -> None:
    assert drawn_once(trace(noisy("its own"))) is None
    assert drawn_once(zoo_graph("gpt2.py")) is None
    assert draws_apart(pinned_plan("gpt2.py", ("layers=4",), data=2, microbatch=2)) == ""
