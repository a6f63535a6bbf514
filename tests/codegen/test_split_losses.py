"""Losses whose classes the tensor ranks share train as those of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.emit import emit
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.trace import trace
from tests.codegen.equality import compare
from tests.codegen.plans import plan_for

# The z-loss of PaLM keeps the logarithm of the softmax's denominator near zero.
Z_LOSS = """
import torch
import torch.nn.functional as F
from torch import nn

CLASSES = {classes}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        logits = self.head(self.embed(ids))
        log_z = torch.logsumexp(logits, dim=-1)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss + 0.1 * log_z.square().mean()

def build_model():
    return Model()

def example_batch(batch_size):
    return {{"ids": torch.randint(CLASSES, (batch_size, 6))}}

def loss(outputs, batch):
    return outputs
"""


def planned(folder: Path, *, classes: int) -> Plan:
    path = folder / f"z_loss_of_{classes}.py"  # ranks stay alive, and import a name once
    path.write_text(Z_LOSS.format(classes=classes))
    file = load_model_file(str(path), ())
    return plan_for(file, trace(file), (), degrees=(1, 1, 2), split=("vocab",))


@pytest.mark.parametrize("classes", [12, 13])
def test_a_z_loss_over_split_classes_trains_as_that_of_one_device(
    classes: int, tmp_path: Path
) -> None:
    plan = planned(tmp_path, classes=classes)
    script = emit(plan, destination=tmp_path / "train.py")
    assert "split_logsumexp(logits, -1, self.tensor)" in script
    assert "gather" not in script.partition("SPLITS")[0].partition("class ")[2]
    assert compare(plan, steps=2, data="random").is_within(1e-10)
