"""Trains a reward model on pairs: the chosen answer should score higher than the rejected one.

autopar plan examples/reward.py --arg base=BASE --arg data=pairs.jsonl --gpus 8 -o reward
torchrun --nproc-per-node 8 reward/train.py --steps 1000 --export reward/model/
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from text_data import Answers, random_tokens
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Comparing(nn.Module):
    """A model that scores texts, trained by comparing the scores of two."""

    def __init__(self, base: str) -> None:
        super().__init__()
        padding = AutoTokenizer.from_pretrained(base).eos_token_id
        self.scorer = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, pad_token_id=padding, dtype=torch.float32, use_cache=False
        ).train()

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map the tokens [rows, 2, length] of chosen and rejected answers to the loss."""
        scores = self.scorer(input_ids=input_ids.flatten(0, 1)).logits.view(-1, 2)
        return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()

    def save_pretrained(self, folder: str | Path) -> None:
        """Export the model that scores."""
        self.scorer.save_pretrained(folder)


def build_model(base: str) -> nn.Module:
    """Return a language model with a new head that outputs one score."""
    return Comparing(base)


def example_batch(batch_size: int, base: str, length: int = 512) -> dict[str, Tensor]:
    """Return two random answers for each row."""
    return {"input_ids": random_tokens(base, batch_size, 2, length)}


def build_dataset(base: str, data: str, length: int = 512) -> Dataset[dict[str, Tensor]]:
    """Return the prompts with their chosen and rejected answers in a file of JSON lines."""
    return Answers(data, base, length, ("chosen", "rejected"))


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a small rate."""
    return AdamW(params, lr=1e-5, weight_decay=0.0)
