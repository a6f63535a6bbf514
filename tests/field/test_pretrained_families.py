"""Twelve families that begin from a folder train as plain PyTorch does, in fp32 and in bf16."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from autopar.codegen.emit import write_script
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.precision import Precision
from autopar.runtime.ranks.randomness import mixed_seed
from tests.cells import cells
from tests.examples.test_examples import losses_by_script
from tests.field import trial
from tests.field.cells import GLOBAL_BATCH, KINDS, MODELS, Subject
from tests.field.families import family_named
from tests.runtime.processes import run_on_ranks

FAMILIES = (
    "GPT-2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi-3", "OPT", "GPT-NeoX", "Mixtral",
    "BERT", "T5",
)  # fmt: skip
WAYS = ("dp 2", "zero-3 2", "tp 2", "pp 2")
CELLS = list(product(FAMILIES, WAYS, (Precision.FP32, Precision.BF16)))
STAND = {
    ("Mixtral", "zero-3 2", Precision.FP32),
    ("GPT-2", "tp 2", Precision.BF16),
}
STEPS = 10
FP32 = 1e-5  # of a loss
# Times as far from fp32 as plain bf16 is. Over ten losses, two trainings that are equally good are
# further apart than this once in 1,000 times (F distribution).
BF16 = 3.0


def plain_losses(file: ModelFile, dtype: torch.dtype) -> torch.Tensor:
    """Train on one device; in 16 bits with fp32 copies of the weights, which alone are stepped."""
    assert file.build_dataset is not None
    assert file.build_optimizer is not None
    model = file.build_model()
    masters = [one.detach().clone() for one in model.parameters()]
    for one in model.parameters():
        one.data = one.data.to(dtype)
    optimizer = file.build_optimizer([nn.Parameter(one) for one in masters])
    stepped = optimizer.param_groups[0]["params"]
    dataset, losses = file.build_dataset(), []
    numbers = torch.Generator().manual_seed(mixed_seed(0, 0))
    order = torch.randperm(len(dataset), generator=numbers).tolist()
    for _ in range(STEPS):
        batch = default_collate([dataset[order.pop(0)] for _ in range(GLOBAL_BATCH)])
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        for master, own in zip(stepped, model.parameters(), strict=True):
            master.grad = None if own.grad is None else own.grad.to(master.dtype)
            own.grad = None
        nn.utils.clip_grad_norm_(stepped, 1.0)
        optimizer.step()
        for master, own in zip(stepped, model.parameters(), strict=True):
            own.data.copy_(master.data)
    return torch.tensor(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way", "precision"), cells(CELLS, STAND))
def test_a_family_from_a_folder_trains_as_in_plain_pytorch(
    family: str, way: str, precision: Precision, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    model: Any = family_named(family).build_model()
    model.save_pretrained(tmp_path / "base")
    arguments = (f"family={family}", f"base={tmp_path / 'base'}")
    subject = Subject(path=MODELS / "pretrained.py", arguments=arguments)
    plan = trial.plan_of(subject, replace(KINDS[way], precision=precision))
    script = write_script(plan, tmp_path / "out")
    words = ["--steps", str(STEPS), "--log-every", "1", "--export", "none"]
    ranks = run_on_ranks(losses_by_script, 2, str(script), words, timeout_seconds=240.0)

    found, file = torch.tensor(ranks[0]), load_model_file(str(subject.path), arguments)
    exact = plain_losses(file, torch.float32)
    if precision is Precision.FP32:
        torch.testing.assert_close(found, exact, rtol=FP32, atol=0.0)
        return
    half = plain_losses(file, torch.bfloat16)
    assert (found - exact).norm() <= BF16 * (half - exact).norm()
