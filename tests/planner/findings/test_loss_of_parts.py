"""How the loss of a batch follows from the losses of its parts is read off the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.planner.findings.loss import Follows, loss_of_parts
from autopar.planner.findings.rows import meeting_rows
from autopar.planner.model.model_file import load_model_file
from autopar.planner.trace import trace
from tests.planner.subjects import ZOO_MODELS, zoo_graph

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn

def build_model():
    model = nn.Linear(4, 3)
    model.register_buffer("classes", torch.arange(1.0, 4.0))
    MODEL.append(model)
    return model

MODEL = []

def example_batch(batch_size):
    return {{"input": torch.randn(batch_size, 4), "mask": torch.rand(batch_size) < 0.5,
            "label": torch.randint(0, 3, (batch_size,))}}

def loss(out, batch):
    label, mask = batch["label"], batch["mask"]
    each = F.cross_entropy(out, label, reduction="none")
    drawn = torch.rand_like(out.detach()[:, 0])
    return {loss}
"""
LOSSES = {
    "each.mean()": Follows.MEAN,
    "0.5 * each.mean() + 0.1 * out.square().mean()": Follows.MEAN,
    "each.mean() + torch.ones(3, device=out.device).sum()": Follows.MEAN,
    "each.sum() / out.shape[0]": Follows.MEAN,
    "each.sum() / (0.0 + out.shape[0])": Follows.MEAN,
    "(torch.zeros(3, device=out.device) + out.sum(0)).sum() / out.shape[0]": Follows.MEAN,
    "(torch.histc(label.float(), bins=3, min=0, max=3) * out.softmax(-1).mean(0)).sum()":
        Follows.NEARLY,  # the balancing loss of experts: counts by probabilities
    "(each * mask).sum() / mask.sum()": Follows.MEAN,
    "(each * mask).sum() / mask.sum().clamp(min=1)": Follows.MEAN,
    "(each * mask).sum() / (mask.sum() + label.sum())": Follows.MEAN,
    "(each * mask).sum() / torch.where(mask.sum() > 3, mask.sum(), torch.ones(()))": Follows.MEAN,
    "(each * mask).sum() / mask.sum() / label.sum()": Follows.NEARLY,
    "F.cross_entropy(out, label) / label.sum()": Follows.NEARLY,
    "(0.1 + each[mask].mean()) / label.sum()": Follows.NEARLY,
    "F.cross_entropy(out, label, ignore_index=1)": Follows.MEAN,
    "each[mask].mean()": Follows.MEAN,
    "each.masked_select(mask).mean()": Follows.MEAN,
    "F.mse_loss(out[torch.where(mask)[0]], batch['input'][torch.where(mask)[0], :3])":
        Follows.MEAN,
    "out[mask].mean(0).sum()": Follows.MEAN,
    "F.cross_entropy(out[mask], label[mask])": Follows.MEAN,
    "each[mask].sum()": Follows.SUM,
    "each[out[:, 0] > 0].mean()": Follows.NEARLY,
    "each[drawn < 0.5].mean()": Follows.NEARLY,
    "torch.cat([each[mask], each]).mean()": Follows.NEARLY,
    "F.cross_entropy(out, label.masked_fill(drawn < 0.5, -100))": Follows.NEARLY,
    "F.cross_entropy(out, out.argmax(-1))": Follows.MEAN,
    "(each * (mask / mask.sum())).sum()": Follows.SUM,
    "each.sum()": Follows.SUM,
    "each.sum() / 8 + out.sum()": Follows.SUM,
    "F.cross_entropy(out, label, reduction='sum')": Follows.SUM,
    "each.mean() * out.shape[0]": Follows.SUM,
    "F.cross_entropy(out, label, weight=torch.arange(1.0, 4.0, device=out.device).to(out))":
        Follows.MEAN,
    "F.cross_entropy(out, out.softmax(-1).detach(), weight=out.new_ones(3))": Follows.MEAN,
    "F.cross_entropy(out, label, weight=MODEL[-1].classes.to(out))": Follows.NEARLY,
    "(each * drawn).sum() / drawn.sum()": Follows.NEARLY,
    "each.mean() + out.mean() * out.softmax(-1).mean()": Follows.NEARLY,
    "each.mean().sqrt()": Follows.MEETS,
    "each.amax()": Follows.MEETS,
    "each.mean().mul_(2).sqrt_()": Follows.MEETS,
    "(out.T @ out).diagonal().add_(-1).pow_(2).sum()": Follows.MEETS,
    "each.mean().mul_(2).add_(out.square().mean())": Follows.MEAN,
    "each.sum() / out.exp().sum()": Follows.MEETS,
    "each.sum() + out.square().mean()": Follows.MEETS,
}  # fmt: skip


@pytest.mark.parametrize(("loss", "follows"), LOSSES.items(), ids=LOSSES)
def test_a_loss_follows_from_its_parts(tmp_path: Path, loss: str, follows: Follows) -> None:
    path = tmp_path / "subject.py"
    path.write_text(SOURCE.format(loss=loss))
    graph = trace(load_model_file(str(path)))
    found = loss_of_parts(graph)
    assert found.follows is follows
    assert found.op is not None
    is_shared = "mask / mask.sum()" in loss  # where rows have the count of all
    assert (meeting_rows(graph) is not None) == (is_shared or follows is Follows.MEETS)


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_losses_of_the_zoo_are_means_over_rows(name: str) -> None:
    assert loss_of_parts(zoo_graph(name)).follows is Follows.MEAN
