"""`autopar plan` verifies what takes seconds, and says how to verify what takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.proof.comparison import Difference, TrainingComparison
from autopar.commands.plan import is_quick, verify_command
from autopar.commands.verify import tell_comparison
from autopar.options import TOLERANCE
from tests.autopar.commands import Autopar, Ran
from tests.codegen.plans import pinned_plan
from tests.field.cells import KINDS, SUBJECTS
from tests.field.trial import plan_of

pytestmark = pytest.mark.usefixtures("forked_python")
_FILE = """
import os

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        CHECK
        return self.layers(x).square().mean()


def build_model():
    return Model()


def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 4)}


class Rows:
    def __len__(self):
        return 16

    def __getitem__(self, row):
        return {"x": torch.full((4,), ROW)}


def build_dataset():
    return Rows()
"""
ON_TWO = ("--gpus", "2", "--device", "cpu", "--global-batch", "4", "--precision", "fp32")
NONE_ON_CPUS = "assert x.is_meta or x.device.type != 'cpu', 'this model needs a GPU'"


def planned(autopar: Autopar, *options: str, row: str = "float(row)", check: str = "pass") -> Ran:
    text = _FILE.replace("ROW", row).replace("CHECK", check)
    Path("model.py").write_text(text, encoding="utf-8")
    return autopar("plan", "model.py", *ON_TWO, "--pin", "dp=2", "-o", "out", *options)


@pytest.mark.slow
def test_a_small_plan_is_verified(autopar: Autopar) -> None:
    ran = planned(autopar, "--verify")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == (
        "Verified: 2 CPU processes train 3 steps as one does (autopar verify out)"
    )


@pytest.mark.slow
def test_a_script_that_trains_otherwise_ends_the_command_with_1(autopar: Autopar) -> None:
    drawn = "int.from_bytes(os.urandom(1), 'big') / 256"
    ran = planned(autopar, "--verify", row=drawn)
    assert ran.code == 1
    assert "DIFFERS" in ran.out
    assert "the script trains otherwise than one process of plain PyTorch" in ran.err
    assert (Path("out") / "train.py").exists()


@pytest.mark.slow
def test_what_does_not_run_on_cpus_is_told_and_planned(autopar: Autopar) -> None:
    ran = planned(autopar, "--verify", check=NONE_ON_CPUS)
    assert ran.code == 0
    assert "could not be verified on the CPUs here: AssertionError: this model needs" in ran.err
    assert ran.out.splitlines()[-1] == "Verify it: autopar verify out"


def test_other_initial_values_are_in_rows_that_name_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    none, some = Difference(largest=0.0, name="w"), Difference(largest=0.5, name="w")
    found = TrainingComparison(
        initial=some,
        loss=none,
        norm=none,
        gradient=none,
        parameter=none,
        losses=(1.0,),
        faults=("w begins with other numbers",),
    )
    tell_comparison(found, TOLERANCE)
    differing = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert len(differing) == 2
    assert all("start" in line for line in differing)


def test_small_models_alone_are_verified_unasked() -> None:
    tiny, large = pinned_plan("gpt2.py", (), data=2), pinned_plan("gpt2.py", ("size=124m",), data=2)
    assert is_quick(tiny, cores=4)
    assert not is_quick(large, cores=64)
    assert not is_quick(pinned_plan("gpt2.py", (), data=8), cores=2)
    assert not is_quick(plan_of(SUBJECTS["pairs"], KINDS["dp 2"]), cores=64), "told, and not equal"
    assert verify_command(tiny, Path("out")) == "autopar verify out"
    assert verify_command(large, Path("out")).startswith("autopar verify out --arg NAME=VALUE")
