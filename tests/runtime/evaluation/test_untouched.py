"""A training goes on after an evaluation as if that had not been."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from autopar.runtime.evaluation.evaluating import evaluated
from autopar.runtime.ranks.mesh import start, stop
from autopar.runtime.recompute import update_once
from tests.runtime.processes import run_on_ranks


class Restless(nn.Module):
    """Draws, counts and changes what it holds, whether it trains or not."""

    runs: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout().eval()
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3).expand(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return noise of x."""
        self.runs += 1
        self.seen = self.seen + random.random()
        return x + torch.rand(x.shape)


def evaluate() -> None:
    mesh, model = start(pipeline=1, data=1, tensor=1), Restless()
    update_once(model, ["runs"], microbatches=2)
    model(torch.zeros(1))
    before = [value.clone() for value in model.buffers()]
    states = torch.get_rng_state(), random.getstate()
    found = []
    for _ in range(2):
        with evaluated([model], mesh, seed=0):
            assert not model.training
            assert not torch.is_grad_enabled()
            found.append(model(torch.zeros(3)))
    assert torch.equal(*found), "each evaluation draws the same"
    assert (model.training, model.frozen.training) == (True, False)
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    model(torch.zeros(1))
    assert model.runs == 1, "the second microbatch of a step"
    stop(mesh)


def test_modes_buffers_and_draws_are_as_they_were() -> None:
    run_on_ranks(evaluate, 1)
