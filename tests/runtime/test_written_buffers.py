"""What does not depend on rows is written once in a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.runtime.written_buffers import update_once


class Counting(nn.Module):
    """Counts its runs twice."""

    step: Tensor
    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self) -> float:
        self.step += 1
        self.runs += 1
        return float(self.step)


def test_all_microbatches_of_a_step_find_a_buffer_as_it_began() -> None:
    model = nn.ModuleDict({"inner": Counting()})
    model.forward = lambda: model["inner"]()
    update_once(model, ("inner.step",), microbatches=3)
    assert [model() for _ in range(7)] == [1, 1, 1, 2, 2, 2, 3]
    inner = model["inner"]
    assert isinstance(inner, Counting)
    assert float(inner.runs) == 7
