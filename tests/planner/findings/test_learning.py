"""Which weights a gradient reaches is what a backward says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planner.findings.optimizer_call import learning_parameters
from autopar.planner.trace import trace
from tests.codegen.forward.small_models import file_of


class Taught(nn.Module):
    """A student and teachers of several kinds, all of which could learn."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.silent, self.detached = (nn.Linear(4, 4) for _ in range(3))
        self.written, self.unread, self.overwritten = (nn.Linear(4, 4) for _ in range(3))
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.silent(x)
        target = target + self.detached(x).detach() + self.frozen(x)
        held = torch.zeros_like(target)
        held[:, :2] = self.written(x)[:, :2]
        self.unread(x)
        detached = held.detach()
        detached.mul_(self.overwritten(x).detach())
        return functional.mse_loss(self.student(x) + held, target)


class Tied(nn.Module):
    """A weight that is read by a teacher and by its student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.teacher.weight = self.student.weight

    def forward(self, x: Tensor) -> Tensor:
        target = self.teacher(x).detach()
        return functional.mse_loss(self.student(x), target)


@pytest.mark.parametrize("model", [Taught, Tied])
def test_the_parameters_that_learn_are_those_with_a_gradient(model: type[nn.Module]) -> None:
    graph = trace(replace(file_of(model), example_batch=lambda n: {"x": torch.randn(n, 4)}))
    plain = model()
    plain(torch.randn(2, 4)).backward()
    wanted = {name for name, one in plain.named_parameters() if one.grad is not None}
    assert learning_parameters(graph) == wanted
