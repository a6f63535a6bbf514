"""An op that nobody here has heard of: a line of the table is all that it needs to be split."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.codegen.emit import write_script
from autopar.planner.axes.infer import infer_axes
from autopar.planner.errors import InputError
from autopar.planner.inspection import inspect_graph, unpriced
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.rules import table
from autopar.planner.trace import trace
from tests.codegen.equality import compare
from tests.codegen.plans import plan_for

OP = "own.linear.default"
LINE = table._contraction(  # as it would stand in the table
    OP, "x … i, weight o i -> … o", contracts="… i o", saves="x if weight, weight if x",
)  # fmt: skip
# Its name is that of a function of PyTorch, which computes something else.
MODEL = '''\
"""A model with a linear op of its own, which doubles."""

import torch
from torch import Tensor, nn


@torch.library.custom_op("own::linear", mutates_args=())
def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * (x @ weight.T)


@doubled.register_fake
def _(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _back(ctx, gradient):
    x, weight = ctx.saved_tensors
    rows = gradient.flatten(0, -2).T @ x.flatten(0, -2)
    return 2 * (gradient @ weight), 2 * rows


doubled.register_autograd(_back, setup_context=_keep)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Parameter(torch.randn(32, 16) / 16)
        self.down = nn.Parameter(torch.randn(16, 32) / 32)

    def forward(self, x):
        return x + doubled(torch.tanh(doubled(self.norm(x), self.up)), self.down)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build_model():
    return Model()


def example_batch(rows):
    return {"tokens": torch.randint(0, 24, (rows, 8)), "labels": torch.randint(0, 24, (rows, 8))}


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
'''


@pytest.fixture(scope="module")  # torch frees an op that another file defines again
def file(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("own") / "own_op.py"
    path.write_text(MODEL, encoding="utf-8")
    return load_model_file(str(path))


def planned(file: ModelFile, *split: str) -> Plan:
    return plan_for(file, trace(file), (), degrees=(1, 1, 2), split=split)


def without_rule(plan: Plan) -> list[str]:
    told = inspect_graph(plan.graph, model="", batch=8, optimizer="adamw")
    return [line.target for line in told.ops_without_rule]


def test_with_one_line_it_is_split_priced_printed_and_trains_as_one_process_does(
    file: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "TABLE", {**table.TABLE, **{rule.target: rule for rule in LINE}})
    plan = planned(file, "ffn")
    assert without_rule(plan) == []
    source = write_script(plan, tmp_path).read_text(encoding="utf-8")
    assert "torch.ops.own.linear.default(" in source
    assert compare(plan).is_within(1e-10)


def test_without_a_line_it_is_told_whole_on_each_tensor_rank_and_trains_as_one_process_does(
    file: ModelFile,
) -> None:
    plan = planned(file)
    assert without_rule(plan) == [OP]
    told = unpriced(plan.graph, infer_axes(plan.graph))
    assert [(one.target, one.count) for one in told] == [(OP, 4)]
    assert compare(plan).is_within(1e-10)
    with pytest.raises(InputError, match="no axis"):
        planned(file, "ffn")
