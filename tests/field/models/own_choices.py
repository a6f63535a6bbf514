"""A model that chooses by itself what a plan chooses, of classes with awkward names.

It checkpoints its layers in both of torch's ways, and has a teacher that learns nothing. One class
is called as another one of another file, one as what scripts have, one stands in a class.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.field import blocks
from tests.field.blocks import VOCAB, WIDTH, token_batch, token_loss


class Block(blocks.Block):
    """A block like the other's, of the same name."""

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to others, half as strongly."""
        out: Tensor = x + 0.5 * super().forward(x)
        return out


class Split(nn.Module):
    """A feed-forward part that is called as what tells how parameters are cut."""

    class Inner(nn.Module):
        """Its inner half."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            """Map activations to others."""
            out: Tensor = self.down(functional.gelu(self.up(x)))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the inner half makes."""
        out: Tensor = x + self.inner(self.norm(x))
        return out


class Model(nn.Module):
    """Layers that run again in the backward, and a frozen copy of the first as their teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([blocks.Block(), Block(), Split(), Block()])
        self.teacher = copy.deepcopy(self.layers[0]).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens to logits, and to how far the first layer is from its teacher."""
        x = self.embed(input_ids)
        with torch.inference_mode():
            taught = self.teacher(x)
        apart = x.new_zeros(())
        for number, layer in enumerate(self.layers):
            again = partial(checkpoint, use_reentrant=number % 2 == 1)
            x = again(layer, x) if self.training else layer(x)
            if number == 0:
                apart = functional.mse_loss(x, taught.clone())
        return self.head(x), apart


def build_model() -> nn.Module:
    """Return the model."""
    return Model()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy, and a tenth of the distance."""
    return token_loss(outputs[0], batch["labels"]) + 0.1 * outputs[1]
