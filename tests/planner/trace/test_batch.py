"""What of a batch a model's forward is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.errors import InputError
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, {takes}):
        return self.linear({reads})

def example_batch(batch_size):
    return {{"x": torch.randn(batch_size, 4), "y": torch.randn(batch_size, 4)}}

def loss(outputs, batch):
    return (outputs - batch["y"]).square().mean()

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("takes", "reads", "given"),
    [
        ("x", "x", ["x"]),
        ("x, **others", "x", ["x"]),
        ("**batch", "batch['x']", ["x", "y"]),
        ("*args, **batch", "batch['x']", ["x", "y"]),
        ("mask=None, **batch", "batch['x']", ["x", "y"]),
    ],
)
def test_a_forward_is_given_what_it_names_or_else_all_that_there_is(
    tmp_path: Path, takes: str, reads: str, given: list[str]
) -> None:
    graph = traced(tmp_path, MODEL.format(takes=takes, reads=reads))
    (model,) = (call for call in graph.calls.values() if not call.path)
    assert sorted(name for name, _ in model.keywords) == given


def test_a_forward_of_everything_still_needs_what_it_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="forward needs z, which the batch does not have"):
        traced(tmp_path, MODEL.format(takes="z, **batch", reads="z"))
