"""A dry run has a size for what masks pick and for products by groups, with their gradients."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from autopar.codegen.proof.dryrun.watching import PICKED, recording

ROWS, WIDTH = 12, 4


@pytest.fixture(autouse=True)
def _third_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PICKED, json.dumps([(ROWS, 1 / 3), (2 * ROWS, 1 / 6)]))


def test_masks_pick_as_many_as_the_plan_expects() -> None:
    with recording():
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        chosen = torch.randint(0, 6, (ROWS, 2))
        rows, slot = torch.where(chosen == 3)
        by_mask = x[(chosen == 3).any(-1)]
        assert rows.shape == slot.shape == (4,)  # a sixth of 2·12
        assert (chosen == 3).nonzero().shape == (4, 2)
        assert by_mask.shape == (4, WIDTH)  # a third of 12
        assert x[x > 0].shape == (ROWS * WIDTH,)  # of which nothing is expected: all of it
        assert x.masked_select(x[:, :1] > 0).shape == (4 * WIDTH,)
        torch.zeros_like(x).index_add(0, rows, x[rows] * by_mask).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.shape == x.shape


def test_products_by_groups_take_any_type() -> None:
    with recording():
        rows = torch.randn(ROWS, 16, requires_grad=True)
        matrices = nn.Parameter(torch.randn(3, 16, 32))
        ends = torch.tensor([4, 8, 12], dtype=torch.int32)
        made = nn.functional.grouped_mm(rows, matrices, offs=ends)
        assert made.shape == (ROWS, 32)
        made.sum().backward()  # type: ignore[no-untyped-call]
        assert _shape(rows.grad) == (ROWS, 16)
        assert _shape(matrices.grad) == (3, 16, 32)


def _shape(gradient: Tensor | None) -> tuple[int, ...]:
    return tuple(gradient.shape) if gradient is not None else ()
