"""What scripts are compared with trains as a person would, with the statistics that a plan has."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from autopar.codegen.proof.comparison import compared
from autopar.codegen.proof.plain import task_of, train_alone
from autopar.codegen.proof.verification import axes_of
from autopar.planner.model.model_file import load_model_file
from autopar.planner.plan.telling.words import statistics_apart
from autopar.planner.trace import trace
from tests.codegen.equality import compare, ranks_by_script
from tests.codegen.normed_apart import normed_apart
from tests.codegen.plans import pinned_plan, plan_for
from tests.runtime.processes import run_on_ranks

TIME_FIRST = """
import torch
from torch import nn


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x).tanh().transpose(0, 1)
        x = self.norm(x.reshape(-1, 8)).view(x.shape)
        return self.last(x.mean(0)).square().mean()


def build_model():
    return TimeFirst()


def example_batch(batch_size):
    return {"x": torch.randn(batch_size, 5, 3)}
"""


def test_blocks_are_normed_one_after_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    other, x = copy.deepcopy(model), torch.randn(8, 3, dtype=torch.float64)
    with normed_apart(4):
        found = model(x)
    expected = torch.cat([other(block) for block in x.chunk(4)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in ("running_mean", "running_var"):
        statistics = (getattr(one[1], name) for one in (model, other))
        torch.testing.assert_close(*statistics, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(x), other(x), rtol=1e-12, atol=1e-12)


def test_a_model_with_batch_norms_has_one_microbatch_and_equals_one_process(tmp_path: Path) -> None:
    path = tmp_path / "time_first.py"
    path.write_text(TIME_FIRST, encoding="utf-8")
    file = load_model_file(str(path))
    plan = plan_for(file, trace(file), (), degrees=(1, 2, 1))
    assert plan.arrangement.microbatches == 1
    assert compare(plan, steps=2).is_within(1e-9)


def test_one_process_knows_nothing_of_microbatches() -> None:
    plan = pinned_plan("resnet.py", pipeline=2, microbatch=4)
    assert task_of(plan, plan.model.spec, steps=2).rows == 8
    (alone,) = run_on_ranks(train_alone, 1, task_of(plan, plan.model.spec, steps=2))
    ranks = ranks_by_script(plan, steps=2, data="dataset", dtype="float64")
    found = compared(ranks, alone, axes_of(plan))
    assert found.loss.largest > 1e-4
    assert "takes the statistics of each of 2 microbatches" in statistics_apart(plan)
