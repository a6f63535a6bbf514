"""`autopar inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.autopar.commands import run

MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def example_batch(batch_size):
    return {"input": torch.zeros(batch_size, 8), "target": torch.zeros(batch_size, 8)}


def loss(output, batch):
    return nn.functional.mse_loss(output, batch["target"])
"""
WITH_SGD = """

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum={momentum})
"""
PARAMETERS = 8 * 16 + 16 + 16 * 8 + 8


@pytest.mark.parametrize(
    ("text", "name", "numbers"),
    [
        (MODEL, "AdamW", 2),
        (MODEL + WITH_SGD.format(momentum=0.9), "SGD", 1),
        (MODEL + WITH_SGD.format(momentum=0.0), "SGD", 0),
    ],
)
def test_it_tells_what_the_optimizer_of_the_model_keeps(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    name: str,
    numbers: int,
) -> None:
    path = tmp_path / "model.py"
    path.write_text(text, encoding="utf-8")
    ran = run(monkeypatch, capsys, "inspect", str(path), "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["optimizer"] == name
    assert found["states"][0]["optimizer_bytes"] == numbers * 4 * PARAMETERS
    assert f"with {name}" in run(monkeypatch, capsys, "inspect", str(path)).out
