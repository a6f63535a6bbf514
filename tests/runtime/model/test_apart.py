"""A layer that is kept apart learns as before, and nobody else sees what it writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.model.parts import keep_apart
from autopar.runtime.recompute.running_again import Mode, recompute


class Layer(nn.Module):
    """Adds to what it is given, and returns that as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        x += self.down(torch.sin(self.up(x.clone()))) * scale
        return {"x": x.view(2, 2, 8)}


def gradients(prepare: Callable[[Layer], None]) -> list[Tensor]:
    torch.manual_seed(0)
    layer = Layer()
    prepare(layer)
    x = torch.randn(4, 8, requires_grad=True)
    found = layer(x * 2, scale=torch.ones(8))["x"]
    found *= 2
    found.square().sum().backward()
    return [one.grad for one in (x, *layer.parameters()) if one.grad is not None]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_gradients_are_those_of_the_plain_layer(mode: Mode) -> None:
    def prepare(layer: Layer) -> None:
        keep_apart(layer)
        recompute(layer, mode)

    for found, expected in zip(gradients(prepare), gradients(lambda _: None), strict=True):
        torch.testing.assert_close(found, expected)


def test_without_keep_apart_a_recomputed_layer_finds_changed_inputs() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(lambda layer: recompute(layer, "full"))


def test_a_layer_kept_apart_changes_no_input_and_returns_no_view() -> None:
    layer, x = Layer(), torch.ones(4, 8)
    names = list(layer.state_dict())
    keep_apart(layer)
    found = layer(x, scale=torch.ones(8))["x"]
    assert x.eq(1).all()
    assert not found._is_view()
    assert isinstance(layer, Layer)
    assert list(layer.state_dict()) == names
