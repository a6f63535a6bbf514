"""Losses that check the numbers they are given are traced as what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from autopar.planner.trace.unlike_types import unchecked
from tests.planner.trace.model_source import ops_of, traced


@pytest.mark.parametrize(
    ("variance", "more"),
    [
        (torch.rand(4, 3), {}),
        (torch.rand(4, 1), {"full": True}),
        (torch.rand(4), {"reduction": "sum", "eps": 0.5}),
        (torch.zeros(4), {}),
        (0.5, {"reduction": "none"}),
    ],
)
def test_the_gaussian_loss_and_its_gradients_are_what_torch_computes(
    variance: Any, more: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, 3)

    def ours(*given: Any) -> Any:
        return unchecked(functional.gaussian_nll_loss, given, more)

    def of_torch(*given: Any) -> Any:
        return functional.gaussian_nll_loss(*given, **more)

    found, expected = (_learned(loss, x, y, variance) for loss in (ours, of_torch))
    torch.testing.assert_close(found, expected)


def _learned(loss: Any, x: Tensor, y: Tensor, variance: Any) -> list[Tensor]:
    """Return a loss, the gradients of what it is given, and the variance as it is then."""
    x = x.clone().requires_grad_()
    learned = [x]
    if isinstance(variance, Tensor):
        variance = variance.clone().requires_grad_()
        learned.append(variance)
    made = loss(x, y, variance)
    gradients = torch.autograd.grad(made.sum(), learned)
    return [made.detach(), *gradients, *(one.detach() for one in learned)]


MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.variance = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return F.gaussian_nll_loss(self.mean(x), x, self.variance(x).exp())

    def build_model():
        return Model()
"""


def test_a_model_with_the_gaussian_loss_is_traced_to_its_logarithm(tmp_path: Path) -> None:
    graph = traced(tmp_path, MODEL)
    assert len(ops_of(graph, "linear")) == 2
    assert len(ops_of(graph, "log")) == 1


def test_other_functions_are_left_alone() -> None:
    assert unchecked(functional.mse_loss, (torch.ones(1), torch.ones(1)), {}) is None
