"""A training goes on after an evaluation as if that had not been."""

from __future__ import annotations

import random
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar.runtime.evaluation.evaluating import computes_as_trained, evaluated
from autopar.runtime.model import compile_layers
from autopar.runtime.ranks.mesh import Mesh, start, stop
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


def test_a_check_runs_compiled_layers_as_they_are(mesh: Mesh) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU()))
    graphs: list[object] = []

    def noted(graph: nn.Module, _: object) -> nn.Module:
        graphs.append(graph)
        return graph

    with patch.object(torch, "compile", partial(torch.compile, backend=noted)):
        compile_layers(model, ["0"])
    with computes_as_trained([model], mesh, seed=0):
        first, second = model(torch.ones(2, 3)), model(torch.ones(2, 3))
        assert torch.equal(first, second)
    assert not graphs
    for _ in range(2):
        model(torch.ones(2, 3))
    assert len(graphs) == 1
