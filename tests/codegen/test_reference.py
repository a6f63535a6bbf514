"""What scripts are compared with trains as a person would, with the statistics that a plan has."""

from __future__ import annotations

import copy

import torch
from torch import nn

from autopar.codegen.reference import normed_in_blocks


def test_blocks_are_normed_one_after_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    other, x = copy.deepcopy(model), torch.randn(8, 3, dtype=torch.float64)
    with normed_in_blocks(4):
        found = model(x)
    expected = torch.cat([other(block) for block in x.chunk(4)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        statistics = (getattr(one[1], name) for one in (model, other))
        torch.testing.assert_close(*statistics, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x), other(x), rtol=1e-12, atol=1e-12)
