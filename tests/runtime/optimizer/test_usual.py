"""What trainings have whose model file has no optimizer: AdamW, its rates, and who is decayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from autopar.runtime.optimizer.building import adamw, warmup_cosine


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 2), nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Linear(2, 1))


def usual(parameters: nn.Module) -> Optimizer:
    return adamw(parameters.parameters(), lr=0.5, betas=(0.9, 0.95), weight_decay=0.1)


def test_norms_and_biases_have_no_decay() -> None:
    made = model()
    optimizer, names = usual(made), {id(one): name for name, one in made.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == {"0.weight", "1.weight", "3.weight"}
    assert others == {"1.bias", "2.weight", "2.bias", "3.bias"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {
        (0.5, (0.9, 0.95))
    }


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [
        # 1/3, 2/3, then a cosine over 18 steps of 0.9 + 0.1; its middle is (1 + 0.1) / 2.
        (21, 2, {0: 1 / 3, 1: 2 / 3, 2: 1.0, 11: 0.55, 20: 0.1, 25: 0.1}),
        (21, 500, {0: 1 / 3, 2: 1.0, 11: 0.55, 20: 0.1}),  # no more than a tenth
        (3, 500, {0: 1.0, 1: 0.55, 2: 0.1}),
        (1, 500, {0: 1.0, 1: 0.1}),
    ],
)
def test_rates_rise_and_fall_along_a_cosine(
    steps: int, warmup: int, expected: dict[int, float]
) -> None:
    optimizer = usual(model())
    scheduler, rates = warmup_cosine(optimizer, steps=steps, warmup=warmup, final=0.1), []
    for _ in range(max(expected) + 1):
        rates.append([group["lr"] / 0.5 for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    found = {step: rates[step] for step in expected}
    assert found == {step: pytest.approx([share, share]) for step, share in expected.items()}


def test_a_stage_without_matrices_has_both_groups() -> None:
    optimizer = usual(nn.LayerNorm(2))
    for parameter in optimizer.param_groups[1]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
