"""The CTC loss is traced, with lengths that are numbers or tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.trace.model_source import ops_of, traced

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5 * 6)

    def forward(self, x):
        scores = self.linear(x).view(-1, 5, 6).log_softmax(-1)
        labels = torch.ones(len(x), 2, dtype=torch.long, device=x.device)
        frames = torch.full((len(x),), 5, device=x.device)
        targets = {targets}
        return F.ctc_loss(scores.transpose(0, 1), targets, frames, labels.sum(-1))

def build_model():
    return Model()
"""


@pytest.mark.parametrize("targets", ["labels", "labels.masked_select(labels > 0)"])
def test_a_ctc_loss_is_one_op(tmp_path: Path, targets: str) -> None:
    (op,) = ops_of(traced(tmp_path, MODEL.format(targets=targets)), "ctc_loss")
    assert op.argument("reduction") == 1
