"""A forward that was assigned to a module alone goes on in the classes that the module takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.data_parallel.batch_norm import widen_norms
from autopar.runtime.model.parts import class_with_forward, keep_apart, take_class
from autopar.runtime.ranks.mesh import Axis
from autopar.runtime.recompute.running_again import recompute


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward = self.doubled

    def doubled(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) * 2)


class Printed(Layer):
    tensor: Axis

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) * 3)


def test_a_subclass_overrides_a_forward_that_an_instance_had() -> None:
    layer, x = Layer(), torch.randn(2, 4)
    expected = layer(x)
    kind = class_with_forward(layer)
    assert issubclass(kind, Layer)
    assert "forward" not in vars(layer)
    layer.__class__ = type("Sub", (kind,), {})
    assert layer(x).equal(expected)


def test_a_module_without_its_own_forward_keeps_its_class() -> None:
    assert class_with_forward(nn.Linear(2, 2)) is nn.Linear


@pytest.mark.parametrize("is_apart", [False, True], ids=["", "kept apart"])
def test_layers_that_run_again_do_what_they_did(is_apart: bool) -> None:
    layer, x = Layer(), torch.randn(2, 4)
    expected = layer(x)
    if is_apart:
        keep_apart(layer)
    recompute(layer, "full")
    assert layer(x).equal(expected)
    layer(x).sum().backward()
    assert layer.linear.weight.grad is not None


def test_a_printed_forward_replaces_an_instances_own() -> None:
    layer, x = Layer(), torch.randn(2, 4)
    take_class(layer, Printed, Axis(0, 1, None))
    assert layer(x).equal(layer.linear(x) * 3)


def test_widened_batch_norms_keep_their_own_forward() -> None:
    norm = nn.BatchNorm1d(4)
    for parameter in norm.parameters():
        parameter.data = parameter.data.half()
    own = norm.forward
    norm.__dict__["forward"] = lambda x: own(x) + 1
    widen_norms(norm)
    found = norm(torch.randn(8, 4).half())
    assert abs(found.mean().item() - 1) < 1e-2


def test_recomputed_batch_norms_are_widened_inside_the_recomputation() -> None:
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4).bfloat16()
    for parameter in norm.parameters():
        parameter.data = parameter.data.bfloat16()
    recompute(norm, "full")
    widen_norms(norm)
    norm(x).sum().backward()
    assert norm.weight.grad is not None
    assert torch.as_tensor(norm.num_batches_tracked).item() == 1
