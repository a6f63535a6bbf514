"""`autopar plan` and `explain --why-not` with the real search: what fits, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.planner.plan.files.document import read_plan
from tests.autopar.commands import Autopar, Ran
from tests.cells import cells
from tests.planner.subjects import ZOO

MNIST, GPT2 = str(ZOO / "mnist.py"), str(ZOO / "gpt2.py")


def printed(ran: Ran) -> str:
    return " ".join((ran.out + ran.err).split())


PAIRS = str(ZOO.parent / "tests/field/models/pairs.py")
pytestmark = pytest.mark.usefixtures("traced_once")
ON_TWO = ("--gpus", "2", "--global-batch", "8", "--device", "h100")


def test_a_batch_whose_rows_a_loss_compares_stays_whole(autopar: Autopar) -> None:
    ran = autopar("plan", PAIRS, *ON_TWO)
    assert ran.code == 0
    assert "note: the rows of a batch meet in matmul" in printed(ran)
    assert "so the batch stays whole" in printed(ran)
    arranged = read_plan(Path("plan.json")).arrangement
    assert (arranged.data, arranged.microbatch) == (1, 8)


def test_a_batch_whose_rows_a_loss_compares_is_split_where_that_is_pinned(autopar: Autopar) -> None:
    ran = autopar("plan", PAIRS, *ON_TWO, "--pin", "dp=2")
    assert ran.code == 0
    assert "each microbatch of each data rank compares its own rows only" in printed(ran)
    assert read_plan(Path("plan.json")).arrangement.data == 2


@pytest.mark.parametrize("pins", cells(("pp=4", "dp=1,tp=1"), ("pp=4",)))
def test_stages_that_would_learn_nothing_are_told(autopar: Autopar, pins: str) -> None:
    frozen = str(ZOO.parent / "tests/field/models/frozen_embedding.py")
    ran = autopar("plan", frozen, "--gpus", "4", "--global-batch", "8", "--pin", pins)
    assert ran.code == 3
    assert "each with some of its 3 layers that learn" in printed(ran)


def test_what_forbids_to_keep_a_batch_whole_is_named(autopar: Autopar) -> None:
    ran = autopar("plan", PAIRS, *ON_TWO, "--max-tp", "1", "--max-pp", "1")
    assert ran.code == 3
    assert "dp=1 (the rows of a batch meet in matmul)" in printed(ran)


REMEMBERING = """
import torch
from torch import nn

class Memory:
    kept = ()

class Layer(nn.Linear):
    def forward(self, x, memory):
        x = super().forward(x).tanh()
        memory.kept = (*memory.kept, x)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(3))

    def forward(self, x):
        memory = Memory()
        for layer in self.layers:
            x = layer(x, memory)
        return x

def build_model():
    return Model()

def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 8)}

def loss(output, batch):
    return output.square().mean()
"""
WRITING = REMEMBERING.replace(").tanh()\n", ")\n").replace(
    "return x\n", "return x.mul_(2).exp()\n", 1
)
RULE = "[[recompute]]\nmodules = '*'\nmode = '{}'\n"


@pytest.mark.parametrize("mode", cells(("full", "none"), ("full",)))
def test_objects_that_layers_keep_till_the_backward_are_told(autopar: Autopar, mode: str) -> None:
    Path("model.py").write_text(REMEMBERING)
    Path("rules.toml").write_text(RULE.format(mode))
    ran = autopar("plan", "model.py", *ON_TWO, "-c", "rules.toml")
    assert ran.code == 0
    note = "layers that are recomputed get a Memory"
    assert (note in printed(ran)) == (mode == "full")


@pytest.mark.parametrize(
    ("around", "note"),
    [
        ("checkpoint(layer, x, memory)", "itself recomputes activations, by torch.utils"),
        ("torch.autocast('cpu', torch.bfloat16)(layer)(x, memory)", "a precision of its own, by"),
    ],
)
def test_what_a_model_chooses_itself_is_told(autopar: Autopar, around: str, note: str) -> None:
    imported = "from functools import partial\nfrom torch.utils import checkpoint as c\n"
    imported += "checkpoint = partial(c.checkpoint, use_reentrant=False)\n"
    Path("model.py").write_text(imported + REMEMBERING.replace("layer(x, memory)", around))
    ran = autopar("plan", "model.py", *ON_TWO)
    assert ran.code == 0
    assert note in printed(ran)
    assert "model.py:" in printed(ran)


def test_a_layer_that_cannot_run_again_is_told_before_a_plan_is_made(autopar: Autopar) -> None:
    Path("model.py").write_text(WRITING)
    Path("rules.toml").write_text(RULE.format("selective"))
    ran = autopar("plan", "model.py", *ON_TWO, "-c", "rules.toml")
    assert ran.code == 2
    assert "layer 'layers.0' cannot be recomputed (selective): mul_" in printed(ran)
    assert "model.py:12" in printed(ran)
    assert not Path("plan.json").exists()


def test_a_plan_that_recomputes_what_cannot_is_refused(autopar: Autopar) -> None:
    Path("model.py").write_text(WRITING)
    Path("rules.toml").write_text(RULE.format("none"))
    assert autopar("plan", "model.py", *ON_TWO, "-c", "rules.toml").code == 0
    plan = json.loads(Path("plan.json").read_text())
    for stage in plan["stages"]:
        stage["recompute"] = ["selective"] * len(stage["recompute"])
    Path("old.json").write_text(json.dumps(plan))
    ran = autopar("emit", "old.json", "-o", "old")
    assert ran.code == 2
    assert "layer 0 cannot be recomputed (selective): mul_ writes into" in printed(ran)
    assert not Path("old").exists()


def test_too_little_memory_is_told_to_the_byte_and_leaves_nothing_behind(autopar: Autopar) -> None:
    demands = ("--gpus", "2", "--global-batch", "8", "--pin", "dp=2")
    ran = autopar("plan", MNIST, *demands, "--device", "h100", "--memory", "1 GiB")
    assert ran.code == 3
    assert "no plan fits: every one needs" in printed(ran)
    assert "short" in printed(ran)
    assert "allow more of the device: --memory" in printed(ran)
    assert "Traceback" not in ran.err
    assert not list(Path().iterdir())


def test_a_time_limit_before_any_plan_has_its_own_code(autopar: Autopar) -> None:
    ran = autopar("plan", MNIST, "--gpus", "2", "--device", "h100", "--time-limit", "1e-9")
    assert ran.code == 5
    assert "the time limit came before any plan was found" in printed(ran)
    assert "--time-limit" in printed(ran)


def test_heads_that_do_not_divide_are_split_unevenly_or_not_at_all(autopar: Autopar) -> None:
    """Four heads over three ranks: an uneven split is a split, whose slowest rank counts."""
    demands = ("--gpus", "3", "--global-batch", "6", "--pin", "tp=3,microbatch=6")
    ran = autopar("plan", GPT2, *demands, "--device", "h100")
    assert ran.code == 0
    assert read_plan(Path("plan.json")).arrangement.tensor == 3


def test_rules_that_mean_one_of_several_equal_layers_are_refused(autopar: Autopar) -> None:
    Path("rules.toml").write_text('[[splits]]\naxis = "ffn"\nmodules = "h.1"\nrule = "forbid"\n')
    ran = autopar("plan", GPT2, "--gpus", "2", "--device", "h100", "-c", "rules.toml")
    assert ran.code == 2
    assert "2 equal layers of class Block" in printed(ran)
    assert "'h.*'" in printed(ran)


def test_why_not_solves_what_a_constraint_forbade(autopar: Autopar) -> None:
    demands = ("--gpus", "4", "--global-batch", "8", "--max-tp", "1", "--pin", "zero=0")
    ran = autopar("plan", MNIST, *demands, "--device", "h100", "-o", "out")
    assert ran.code == 0
    refused = autopar("explain", "out", "--why-not", "tp=4")
    assert (refused.code, "give it on the command line" in refused.err) == (2, True)
    asked = ("explain", "out", "--model", MNIST, "--why-not")
    why = autopar(*asked, "tp=4")
    assert (why.code, why.err) == (0, "")
    assert "at most tp=1 (--max-tp) forbids it" in printed(why)
    assert "its step takes" in printed(why)
    assert "decide" in printed(why)
    of_batch = autopar(*asked, "microbatch=3")
    assert "a global batch of 8 (the plan)" in printed(of_batch)
    other_zero = autopar(*asked, "zero=3,dp=4")
    assert "zero=0 (--pin) forbids it" in printed(other_zero)


@pytest.mark.parametrize(("pins", "is_told"), [(("--pin", "tp=2"), True), ((), False)])
def test_tensor_ranks_that_share_nothing_are_told(
    autopar: Autopar, pins: tuple[str, ...], *, is_told: bool
) -> None:
    Path("model.py").write_text(REMEMBERING)
    ran = autopar("plan", "model.py", *ON_TWO, *pins)
    assert ran.code == 0
    assert ("each tensor rank computes all that the others do" in printed(ran)) == is_told
