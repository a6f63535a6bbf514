"""Models that are built without memory: nothing is filled, and what torch refuses is refused."""

import pytest
import torch
from torch import nn

from autopar.planner.model.without_memory import without_memory


def test_layers_have_sizes_and_no_numbers() -> None:
    with without_memory():
        layer = nn.Embedding(10, 4)
        nn.init.trunc_normal_(layer.weight, std=0.02)
    assert layer.weight.is_meta
    assert layer.weight.shape == (10, 4)


def test_a_tensor_that_needs_a_gradient_is_not_filled_in_place() -> None:
    with without_memory(), pytest.raises(RuntimeError, match="leaf Variable"):
        torch.ones(3, requires_grad=True).normal_()


def test_numbers_that_are_not_floating_are_not_filled_with_normal_ones() -> None:
    with without_memory(), pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, dtype=torch.int64).normal_()


def test_tensors_with_memory_are_filled() -> None:
    with without_memory():
        kept = torch.zeros(100, device="cpu").normal_()
    assert kept.std() > 0.1
