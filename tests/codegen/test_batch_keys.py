"""The batch is known by its keys, whatever letters they have, and whatever the model calls so."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.graph.graph import batch_key
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.codegen.equality import compare
from tests.codegen.plans import plan_for

SOURCE = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.arange(6.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]))

    def forward(self, X, mask, scale):
        return self.last(self.first(X * self.mask).tanh()) * self.scale * scale * mask


def build_model():
    return Masked()


def example_batch(batch_size):
    keys = ("X", "mask", "scale", "Y")
    return {key: torch.rand(batch_size, 6) for key in keys}


def loss(outputs, batch):
    first, last = batch["Y"].chunk(2, dim=1)
    return (outputs - torch.cat((last, first), dim=1)).square().mean()
"""


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)], ids=["stages", "tensor ranks"])
def test_keys_are_found_under_their_own_names(
    tmp_path: Path, degrees: tuple[int, int, int]
) -> None:
    path = tmp_path / "masked.py"
    path.write_text(SOURCE, encoding="utf-8")
    file = load_model_file(str(path))
    graph = trace(file)
    assert list(map(batch_key, graph.inputs)) == ["X", "mask", "scale", "Y"]
    assert len(graph.tensors["mask"].shape) == 1  # the buffer
    split = ("8",) if degrees[2] > 1 else ()
    assert compare(plan_for(file, graph, (), degrees=degrees, split=split), steps=2).is_within(1e-9)
