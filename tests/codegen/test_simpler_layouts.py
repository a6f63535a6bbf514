"""Layouts that print less train as one device does, and so does a mean over a part of a dim."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.codegen.emit import emit
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.cells import cells
from tests.codegen.equality import compare
from tests.codegen.plans import pinned_plan, plan_for

NORMED = '''\
"""A perceptron whose hidden features are normed, and whose positions are pooled."""

import torch
from torch import Tensor, nn


class Normed(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
        return self.down(x).mean(1)


def build_model(hidden: int):
    return Normed(hidden)


def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 6, 8), "wanted": torch.randn(batch_size, 4)}


def loss(outputs, batch):
    return (outputs - batch["wanted"]).square().sum() / 100
'''


def normed_plan(folder: Path, hidden: int) -> Plan:
    path = folder / "normed.py"
    path.write_text(NORMED)
    arguments = (f"hidden={hidden}",)
    file = load_model_file(str(path), arguments)
    return plan_for(file, trace(file), arguments, degrees=(1, 1, 2), split=(str(hidden),))


@pytest.mark.parametrize(("hidden", "share"), [(32, "/ self.tensor.size"), (33, "local_size(")])
def test_a_mean_over_a_split_dim_adds_up_from_means_over_parts(
    tmp_path: Path, hidden: int, share: str
) -> None:
    plan = normed_plan(tmp_path, hidden)
    text = emit(plan, destination=tmp_path / "train.py")
    assert "place_own" not in text
    assert share in text
    assert compare(plan, steps=2).is_within(1e-9)


@pytest.mark.parametrize("name", cells(("gpt2.py", "llama.py", "bert.py"), ("llama.py",)))
def test_simpler_layouts_train_as_one_device_and_print_less(name: str, tmp_path: Path) -> None:
    fastest, simpler = (pinned_plan(name, tensor=2, tolerance=x) for x in (0.0, 0.2))
    longest = fastest.prediction.step_seconds * 1.2
    assert simpler.prediction.step_seconds <= longest
    assert simpler.layouts != fastest.layouts
    assert printed_lines(simpler, tmp_path) < printed_lines(fastest, tmp_path)
    assert compare(simpler, steps=2).is_within(1e-9)


def printed_lines(plan: Plan, folder: Path) -> int:
    """Return how many lines a script has from its first class to its model."""
    text = emit(plan, destination=folder / "train.py")
    found = re.search(r"^class .*?^def build_model", text, re.MULTILINE | re.DOTALL)
    return found.group().count("\n") if found else 0
