"""What does not depend on rows is written once in a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.runtime.recompute.written_buffers import update_once


class Counting(nn.Module):
    """Counts its runs twice, and multiplies by one of the counts, which a backward reads."""

    step: Tensor
    runs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("step", torch.zeros(()))
        self.register_buffer("runs", torch.zeros(()))

    def forward(self) -> Tensor:
        self.step += 1
        self.runs += 1
        return self.weight * self.step


class Both(nn.Module):
    """Runs what it holds, and adds up the results."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self) -> Tensor:
        return torch.stack([one() for one in self.inner]).sum()


def test_all_microbatches_of_a_step_find_a_buffer_as_it_began() -> None:
    counting = Counting()
    model = Both(counting)
    update_once(model, ("inner.0.step",), microbatches=3)
    assert [int(model()) for _ in range(7)] == [1, 1, 1, 2, 2, 2, 3]
    assert int(counting.runs) == 7


def test_a_backward_that_comes_later_reads_what_its_own_forward_wrote() -> None:
    model = Counting()
    update_once(model, ("step",), microbatches=2)
    for step in (1, 2, 3):
        (model() + model()).backward()
        assert model.weight.grad is not None
        assert int(model.weight.grad) == 2 * step
        model.weight.grad = None


def test_a_buffer_that_two_modules_share_stays_shared() -> None:
    one, other = Counting(), Counting()
    other.step = one.step
    model = Both(one, other)
    update_once(model, ("inner.0.step", "inner.1.step"), microbatches=2)
    assert [int(model()) for _ in range(3)] == [3, 3, 7]
    assert one.step is other.step
