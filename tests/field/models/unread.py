"""Weights that run and do not matter: those of an encoder that no layer reads, and of a head."""

from __future__ import annotations

from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class Reading(nn.Module):
    """A block that is given what an encoder made, and reads it only if it should."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.block, self.reads = Block(), reads

    def forward(self, x: Tensor, made: Tensor) -> Tensor:
        """Map activations to others."""
        out: Tensor = self.block(x + made if self.reads else x)
        return out


class Unread(nn.Module):
    """An encoder and a decoder that does without it; a second head, whose result is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other_embed = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList([Block(), Block()])
        self.decoder = nn.ModuleList([Reading(reads=False), Reading(reads=False)])
        self.head, self.other_head = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens to logits, and to what nobody asks for."""
        made, x = self.other_embed(input_ids), self.embed(input_ids)
        for block in self.encoder:
            made = block(made)
        for block in self.decoder:
            x = block(x, made)
        return self.head(x), self.other_head(made)


def build_model() -> nn.Module:
    """Return the model."""
    return Unread()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the first result."""
    return token_loss(outputs[0], batch["labels"])
