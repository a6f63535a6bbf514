"""Embeddings that do not learn, below a stack that does."""

from __future__ import annotations

from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class Frozen(nn.Module):
    """A frozen table and a frozen first block, then blocks that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Frozen()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
