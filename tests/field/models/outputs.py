"""A model whose outputs are a dict, a tuple, or a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


@dataclass
class Output:
    """What the model computes."""

    logits: Tensor
    hidden: Tensor


class Returning(nn.Module):
    """Blocks, and what they compute in one form or another."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Any:
        """Map tokens to logits and hidden states."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if self.form == "dict":
            return {"logits": logits, "hidden": x}
        return Output(logits, x) if self.form == "dataclass" else (logits, x)


def build_model(form: str = "tuple") -> nn.Module:
    """Return the model."""
    return Returning(form)


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, and a little for large hidden states."""
    logits: Tensor
    hidden: Tensor
    if isinstance(outputs, dict):
        logits, hidden = outputs["logits"], outputs["hidden"]
    elif isinstance(outputs, tuple):
        logits, hidden = outputs
    else:
        logits, hidden = outputs.logits, outputs.hidden
    return token_loss(logits, batch["labels"]) + 0.01 * hidden.pow(2).mean()
