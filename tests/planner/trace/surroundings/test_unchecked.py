"""Losses that check the numbers they are given are traced as what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from autopar.planner.trace.surroundings.unchecked import unchecked


@pytest.mark.parametrize(
    ("variance", "more"),
    [
        (torch.rand(4, 3), {}),
        (torch.rand(4, 1), {"full": True}),
        (torch.zeros(4), {"reduction": "sum", "eps": 0.1}),
        (0.5, {"reduction": "none"}),
    ],
)
def test_the_gaussian_loss_is_what_torch_computes(variance: Any, more: dict[str, Any]) -> None:
    x, y = torch.randn(2, 4, 3)
    expected = functional.gaussian_nll_loss(x, y, variance, **more)
    found = unchecked(functional.gaussian_nll_loss, (x, y, variance), more)
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_other_functions_are_left_alone() -> None:
    assert unchecked(functional.mse_loss, (torch.ones(1), torch.ones(1)), {}) is None
