"""Trains a classifier's head on the outputs of a frozen text encoder.

autopar plan examples/classifier.py --arg base=BASE --arg data=texts.jsonl --gpus 2 -o topics
torchrun --nproc-per-node 2 topics/train.py --steps 1000 --export topics/head/

The export has the head alone; `--weights topics/head/` starts from it.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from text_data import Texts, random_tokens
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset
from transformers import AutoModel


class Classifier(nn.Module):
    """A frozen encoder, and a head on the mean of its tokens."""

    def __init__(self, base: str, classes: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(base, dtype=torch.float32).eval()
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, text_ids: Tensor, text_mask: Tensor) -> Tensor:
        """Map tokens to the logits of classes."""
        with torch.no_grad():
            tokens = self.encoder(input_ids=text_ids, attention_mask=text_mask).last_hidden_state
        counted = text_mask.unsqueeze(-1).to(tokens.dtype)
        logits: Tensor = self.head((tokens * counted).sum(1) / counted.sum(1))
        return logits

    def save_pretrained(self, folder: str | Path) -> None:
        """Export the head alone."""
        save_file(self.head.state_dict(), Path(folder) / "model.safetensors")


def build_model(base: str, classes: int = 4) -> nn.Module:
    """Return an encoder with a new head."""
    return Classifier(base, classes)


def example_batch(
    batch_size: int, base: str, classes: int = 4, length: int = 128
) -> dict[str, Tensor]:
    """Return random texts and labels."""
    return {
        "text_ids": random_tokens(base, batch_size, length),
        "text_mask": torch.ones(batch_size, length, dtype=torch.long),
        "label": torch.randint(classes, (batch_size,)),
    }


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(outputs, batch["label"])


def build_dataset(base: str, data: str, length: int = 128) -> Dataset[dict[str, Tensor]]:
    """Return the texts and label numbers in a file of JSON lines."""
    return Texts(data, base, length, ("text",))


def build_optimizer(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with a large rate, because the head is new."""
    return AdamW(params, lr=1e-3, weight_decay=0.0)
