"""Images lie pixel by pixel where the model's own code allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.subjects import zoo_graph

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 8 * 8, 5)

    def forward(self, images):
        return self.head(self.conv(images).{flatten})

def build_model():
    return Net()

def example_batch(rows):
    return {{"images": torch.randn(rows, 3, 8, 8), "labels": torch.randint(0, 5, (rows,))}}

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["labels"])
"""


@pytest.mark.parametrize(
    ("flatten", "found"),
    [("flatten(1)", ("images",)), ("view(-1, 4 * 8 * 8)", ())],
)
def test_a_view_over_channels_and_pixels_keeps_the_usual_order(
    flatten: str, found: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "net.py"
    path.write_text(HEAD.format(flatten=flatten), encoding="utf-8")
    file = load_model_file(str(path))

    assert trace(file).images == found


def test_a_model_without_convolutions_has_no_images() -> None:
    assert zoo_graph("gpt2.py").images == ()
