"""Trains a language model to prefer some answers to others (DPO, Rafailov et al. 2023).

autopar plan examples/dpo.py --arg base=BASE --arg data=pairs.jsonl --gpus 8 -o tuned
torchrun --nproc-per-node 8 tuned/train.py --steps 1000 --export tuned/model/
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from fine_tune import build_model as build_policy
from text_data import IGNORED, Answers, random_tokens
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset

BETA = 0.1  # how strongly the policy is kept near the reference


class Preferring(nn.Module):
    """A policy that is trained, and a frozen copy of the model from which it began."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.policy = build_policy(base)
        self.reference = build_policy(base).eval().requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Map the tokens [rows, 2, length] of chosen and rejected answers to the loss."""
        with torch.no_grad():
            before = log_likelihoods(self.reference, input_ids, labels)
        chosen, rejected = (log_likelihoods(self.policy, input_ids, labels) - before).unbind(1)
        return -F.logsigmoid(BETA * (chosen - rejected)).mean()

    def save_pretrained(self, folder: str | Path) -> None:
        """Export the policy alone."""
        self.policy.save_pretrained(folder)  # type: ignore[operator]


def log_likelihoods(model: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the log-likelihood of each of two answers to each prompt."""
    logits = model(input_ids=input_ids.flatten(0, 1)).logits[:, :-1]
    wanted = labels.flatten(0, 1)[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
    return -losses.sum(1).view(-1, 2)


def build_model(base: str) -> nn.Module:
    """Return the policy beside its reference."""
    return Preferring(base)


def example_batch(batch_size: int, base: str, length: int = 512) -> dict[str, Tensor]:
    """Return two random answers for each row."""
    ids = random_tokens(base, batch_size, 2, length)
    return {"input_ids": ids, "labels": ids}


def build_dataset(base: str, data: str, length: int = 512) -> Dataset[dict[str, Tensor]]:
    """Return the prompts with their chosen and rejected answers in a file of JSON lines."""
    return Answers(data, base, length, ("chosen", "rejected"))


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a small rate."""
    return AdamW(params, lr=5e-7, weight_decay=0.0)
