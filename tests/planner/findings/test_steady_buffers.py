"""Buffers that a step writes whatever its rows are are told from all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.findings.writes import steady_buffers
from tests.planner.subjects import ZOO_MODELS, zoo_graph
from tests.planner.trace.model_source import traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        for name in ("step", "mean", "unread", "kept"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x):
        {line}
        return self.norm(self.linear(x)) * self.step * self.mean * self.kept

def build_model():
    return Model()
"""


@pytest.mark.parametrize(
    ("line", "steady"),
    [
        ("self.step += 1", ("step",)),
        ("self.step = self.step * 0.9 + self.kept", ("step",)),
        ("torch.mul(self.step, 0.5, out=self.step)", ("step",)),
        ("self.step.copy_(self.linear.weight.detach().amax(0))", ("step",)),
        ("self.unread += 1", ("unread",)),  # who exports it reads it
        ("self.mean.copy_(x.mean(0))", ()),
        ("self.mean.mul_(0.9).add_(x.detach().amax(0))", ()),
        ("self.step += 1; self.mean.lerp_(x.mean(0), 0.1)", ("step",)),
    ],
)
def test_a_buffer_is_steady_if_rows_have_no_part_in_it(
    tmp_path: Path, line: str, steady: tuple[str, ...]
) -> None:
    assert steady_buffers(traced(tmp_path, MODEL.format(line=line))) == steady


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_the_zoo_has_none(name: str) -> None:
    assert not steady_buffers(zoo_graph(name))
