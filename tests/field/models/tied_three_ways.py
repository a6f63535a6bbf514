"""One table reads the source, reads the target, and writes the target."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class TiedThreeWays(nn.Module):
    """A source and a target, each with its own block, and blocks over both."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, WIDTH)
        self.target = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = Block(), Block()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.target.weight = self.head.weight = self.source.weight

    def forward(self, source_ids: Tensor, input_ids: Tensor) -> Tensor:
        """Map both to the logits of the target."""
        x = self.encoder(self.source(source_ids)) + self.decoder(self.target(input_ids))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return TiedThreeWays()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens for source and target."""
    batch = token_batch(batch_size)
    return {"source_ids": torch.randint(VOCAB, batch["input_ids"].shape), **batch}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
