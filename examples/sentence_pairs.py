"""Trains a sentence encoder to place each sentence nearest to its partner in the batch.

autopar plan examples/sentence_pairs.py --arg base=BASE --arg data=pairs.jsonl --gpus 2 -o encoder
torchrun --nproc-per-node 2 encoder/train.py --steps 1000 --export encoder/model/

Each sentence is compared with the whole batch, so the plan splits the model and not the batch.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from text_data import Texts, random_tokens
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset
from transformers import AutoModel

SCALE = 20.0  # cosines times this are the logits


class Pairs(nn.Module):
    """One encoder for both sentences of a pair."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(base, dtype=torch.float32).train()

    def forward(
        self, first_ids: Tensor, first_mask: Tensor, second_ids: Tensor, second_mask: Tensor
    ) -> Tensor:
        """Map the tokens of pairs to the cosines of each first sentence with each second one."""
        first = self.encoded(first_ids, first_mask)
        return SCALE * first @ self.encoded(second_ids, second_mask).T

    def encoded(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of each sentence's tokens, as a vector of length one."""
        tokens = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        counted = mask.unsqueeze(-1).to(tokens.dtype)
        return F.normalize((tokens * counted).sum(1) / counted.sum(1), dim=-1)

    def save_pretrained(self, folder: str | Path) -> None:
        """Export the encoder."""
        self.encoder.save_pretrained(folder)


def build_model(base: str) -> nn.Module:
    """Return an encoder from a folder or from the hub."""
    return Pairs(base)


def example_batch(batch_size: int, base: str, length: int = 64) -> dict[str, Tensor]:
    """Return random pairs."""
    mask = torch.ones(batch_size, length, dtype=torch.long)
    return {
        "first_ids": random_tokens(base, batch_size, length),
        "first_mask": mask,
        "second_ids": random_tokens(base, batch_size, length),
        "second_mask": mask,
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of finding the second sentence of each pair."""
    places = torch.arange(len(batch["first_ids"]), device=outputs.device)
    return F.cross_entropy(outputs, places)


def build_dataset(base: str, data: str, length: int = 64) -> Dataset[dict[str, Tensor]]:
    """Return the pairs of sentences in a file of JSON lines."""
    return Texts(data, base, length, ("first", "second"))


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a small rate."""
    return AdamW(params, lr=2e-5, weight_decay=0.01)
