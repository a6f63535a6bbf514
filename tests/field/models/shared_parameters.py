"""Layers that share: one block is called three times, and two other blocks share one matrix."""

from __future__ import annotations

from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class Shared(nn.Module):
    """A block again and again, then two that share their feed-forward input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.again = Block()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].up = self.blocks[0].up
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.embed(input_ids)
        for _ in range(3):
            x = self.again(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Shared()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
