"""Trains a model file by the loop that a person would write for one device, and by its script."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from autopar.codegen.emit import write_script
from autopar.codegen.proof.exactness import ExactMode, all_steps, clipped_share, trained_tensors
from autopar.codegen.proof.plain import TrainedAlone
from autopar.planner.model.model_file import ModelFile, load_model_file
from autopar.planner.plan.plan import Plan
from autopar.planner.plan.telling.words import ADAMW, CLIP_NORM
from autopar.runtime.ranks.randomness import mixed_seed
from autopar.runtime.weights.plain_model import plain_model
from tests.codegen.equality import together
from tests.codegen.printed import run_twice
from tests.field.cells import Subject
from tests.runtime.processes import run_on_ranks

STEPS = 4
SECONDS = 120.0  # for a script that hangs
Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What a loop saw and made."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]  # before each step clips the gradients
    trained: Mapping[str, Tensor]  # parameters and buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class ByScript:
    """What a script printed in fp32, as it is, and what its ranks did in float64."""

    text: str
    printed: tuple[float, ...]
    exact: TrainedAlone


def default_optimizer(model: nn.Module, steps: int) -> tuple[AdamW, LambdaLR]:
    """Return the optimizer and the schedule of a training without either in its model file.

    They are written out as a person would for so few steps, which have no warm-up.
    """
    learning = [one for one in model.parameters() if one.requires_grad]
    matrices = [one for one in learning if one.ndim > 1]
    vectors = {"params": [one for one in learning if one.ndim <= 1], "weight_decay": 0.0}
    optimizer = AdamW(
        [{"params": matrices, "weight_decay": ADAMW.weight_decay}, vectors],
        lr=ADAMW.learning_rate,
        betas=ADAMW.betas,
    )
    lowest, rest = ADAMW.final_share, 1 - ADAMW.final_share
    return optimizer, LambdaLR(
        optimizer, lambda step: lowest + rest * math.cos(math.pi * step / (steps - 1) / 2) ** 2
    )


@cache
def train_plainly(subject: Subject, dtype: torch.dtype, *, rows: int) -> Plain:
    """Train on one device, each step on a global batch at once; clip as the run is clipped.

    With fewer `rows` than the batch has, each part of so many rows has a loss of its own, and the
    loss is their mean: what notes tell of plans that split a batch whose rows meet. In float64 no
    op of the model computes in float32, and shares of gradients are clipped to.
    """
    file = load_model_file(str(subject.path), subject.arguments)
    assert file.build_dataset is not None
    model = plain_model(file.build_model, seed=0).to(dtype)  # the weights that scripts begin with
    dataset = file.build_dataset()
    numbers = torch.Generator().manual_seed(mixed_seed(0, 0))
    order = torch.randperm(len(dataset), generator=numbers).tolist()
    is_exact = dtype is torch.float64
    optimizer, scheduler = default_optimizer(model, all_steps(STEPS) if is_exact else STEPS)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        chosen = [dataset[order.pop(0)] for _ in range(subject.global_batch)]
        batch = default_collate(chosen)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        with ExactMode(dtype) if is_exact else nullcontext():
            parts = [_loss(file, model, part) for part in _parts(batch, rows)]
            loss = torch.stack(parts).mean()
            torch.autograd.backward(loss)
        losses.append(loss.item())
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        limit = float(norm) * clipped_share(step) if is_exact else CLIP_NORM
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        norms.append(float(norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    trained = {name: one.detach() for name, one in trained_tensors(model)}
    return Plain(losses=tuple(losses), norms=tuple(norms), trained=trained)


def _loss(file: ModelFile, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a model on what its forward names."""
    names = inspect.signature(model.forward).parameters
    found = model(**{key: value for key, value in batch.items() if key in names})
    if file.loss is not None:
        found = file.loss(found, batch)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss


def _parts(batch: Batch, rows: int) -> list[Batch]:
    starts = range(0, len(next(iter(batch.values()))), rows)
    return [{key: v[start : start + rows] for key, v in batch.items()} for start in starts]


def train_by_script(plan: Plan) -> ByScript:
    """Emit the script of a plan, and run it twice on its ranks."""
    with TemporaryDirectory(prefix="script-") as folder:
        path = write_script(plan, Path(folder))
        text = path.read_text(encoding="utf-8")
        ranks = run_on_ranks(
            run_twice, plan.arrangement.ranks, str(path), STEPS, timeout_seconds=SECONDS
        )
    return ByScript(text=text, printed=ranks[0][0], exact=together([exact for _, exact in ranks]))
