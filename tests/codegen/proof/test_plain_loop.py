"""The loop that `verify --plain` writes trains on the rows, weights and rates of the script."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch

from autopar.codegen.emit import script_text
from autopar.codegen.proof.plain_loop import plain_loop
from autopar.codegen.proof.script_rank import imported
from autopar.codegen.proof.verification import read_script_of
from autopar.codegen.subject import subject_of
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from autopar.runtime.weights.plain_model import plain_model
from tests.codegen.plans import plan_for
from tests.runtime.processes import run_on_ranks

STEPS = 4
_FILE = """
import random

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

WORDS = 24


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        nn.init.trunc_normal_(self.words.weight, 0.5, 1.0, 0.0, 1.0)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        self.register_buffer("mask", (torch.rand(8) < 0.5).float(), persistent=False)
        torch.set_rng_state(state)
        self.up, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, WORDS)

    def forward(self, x, y=None):
        logits = self.head(self.norm(F.gelu(self.up(self.words(x) * self.mask))))
        return RETURNED


def build_model():
    return Model()


def example_batch(batch_size):
    x, y = torch.randint(WORDS, (2, batch_size, 6))
    return {"x": x, "y": y}

"""
_LOSS = "F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)"
_OWN_LOSS = """
def loss(outputs, batch):
    targets = batch["y"].flatten()
    return F.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=-100)
"""
_ROWS = """
class Rows(Dataset):
    def __len__(self):
        return 11

    def __getitem__(self, row):  # draws from all three generators
        ids = (torch.arange(7) * (row + 1) + torch.randint(3, ()) + random.randrange(3)) % WORDS
        ids[numpy.random.randint(7)] = 0
        return {"x": ids[:6].tolist(), "y": ids[1:].numpy()}


def build_dataset():
    return Rows()
"""
_STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        for row in range(7):
            ids = (torch.arange(7) * (row + 1) + torch.randint(9, ())) % WORDS
            yield {"x": ids[:6], "y": ids[1:]}


def build_dataset():
    return Stream()
"""
_COLLATED = """
def build_dataset():
    return [{"ids": [(row * place) % WORDS for place in range(3 + row % 5)]} for row in range(11)]


def build_collate():
    def pad(rows):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in rows], True)
        y = nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in rows], True, -100)
        return {"x": ids[:, :-1], "y": y[:, 1:]}

    return pad
"""
_NAMED = """
def build_optimizer(named_parameters):
    named = list(named_parameters)
    still = [one for name, one in named if "words" in name]
    rest = [one for name, one in named if "words" not in name]
    return torch.optim.SGD([{"params": still, "lr": 0.0}, {"params": rest}], lr=0.1, momentum=0.9)


def build_scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""
_OF_MODEL = """
def build_optimizer(model):
    return torch.optim.AdamW(model.head.parameters(), lr=0.01)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """What stands in a model file, and the degrees that it is planned with."""

    returned: str
    rest: str
    degrees: tuple[int, int, int] = (1, 2, 1)
    split: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "one batch": Case(_LOSS, ""),
    "rows that draw": Case(f"({_LOSS}, logits)", _ROWS, (1, 1, 2), ("vocab",)),
    "a loss of the file's own": Case("logits", _OWN_LOSS + _ROWS + _OF_MODEL, (1, 2, 1)),
    "a stream": Case(f"{{'logits': logits, 'loss': {_LOSS}}}", _STREAM + _NAMED),
    "a collate": Case("logits", _OWN_LOSS + _COLLATED + _NAMED),
}


def written(case: Case, folder: Path) -> tuple[Plan, Path, Path]:
    """Write a model file, its script and its plain loop; return the plan and where both are."""
    text = _FILE.replace("RETURNED", case.returned) + case.rest
    path = folder / f"model_{crc32(text.encode())}.py"
    path.write_text(text, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=case.degrees, split=case.split, microbatch=2)
    script, loop = folder / "train.py", folder / "plain.py"
    subject = subject_of(plan, folder)
    script.write_text(script_text(plan, subject, script), encoding="utf-8")
    given = read_script_of(plan, script, folder)
    loop.write_text(plain_loop(plan, subject, given, loop), encoding="utf-8")
    return plan, script, loop


def train_plainly(path: str) -> list[float]:
    """Run a plain loop."""
    with patch.object(sys, "argv", [path, str(STEPS)]), redirect_stdout(StringIO()):
        module: Any = imported(Path(path))
        losses: list[float] = module.main()
    return losses


def train_by_script(path: str) -> list[float]:
    """Run a script in fp32."""
    arguments = ["--steps", str(STEPS), "--log-every", "1", "--dtype", "float32"]
    with redirect_stdout(StringIO()):
        module: Any = imported(Path(path))
        losses: list[float] = module.main(arguments)[1]
    return losses


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_script(name: str, tmp_path: Path) -> None:
    plan, script, loop = written(CASES[name], tmp_path)
    assert "import autopar" not in loop.read_text(encoding="utf-8")
    assert "from autopar" not in loop.read_text(encoding="utf-8")
    (plain,) = run_on_ranks(train_plainly, 1, str(loop))
    found = run_on_ranks(train_by_script, plan.arrangement.ranks, str(script))[0]
    assert found == pytest.approx(plain, abs=1e-5, rel=0.0)
    assert len(set(plain)) == STEPS


def test_weights_are_drawn_as_every_plan_draws_them(tmp_path: Path) -> None:
    _, _, loop = written(CASES["one batch"], tmp_path)
    with patch.object(sys, "argv", [str(loop)]):
        module: Any = imported(loop)
    file = load_model_file(str(next(tmp_path.glob("model_*.py"))))
    expected = plain_model(file.build_model, seed=0)
    found = module.build_model().state_dict(keep_vars=True) | {"mask": module.build_model().mask}
    wanted = expected.state_dict(keep_vars=True) | {"mask": expected.mask}
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
