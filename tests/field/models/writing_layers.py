"""Layers that write into what they are given, and are written to in what they return."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tests.field.blocks import VOCAB, WIDTH, token_batch, token_loss


class Layer(nn.Module):
    """Activates what it is given in place, and returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the activated input, and what is made of it, row by row of a table."""
        x = self.before(x)
        made = self.narrow(functional.gelu(self.wide(x.flatten(0, 1))))
        return x, made.view(x.shape)


class Writing(nn.Module):
    """A few layers, to whose results the input is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        x = self.embed(input_ids)
        for layer in self.layers:
            given, made = layer(x)
            made += given
            x = made
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Writing()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
