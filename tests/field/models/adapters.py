"""A frozen model, of which adapters of low rank beside its products learn (LoRA), and a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class Adapted(nn.Module):
    """A frozen product, and a learned one of low rank that is added to it, scaled."""

    def __init__(self, frozen: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.frozen, self.scale = frozen.requires_grad_(False), 0.5
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations to others."""
        out: Tensor = self.frozen(x) + self.scale * self.up(self.down(x))
        return out


def adapt(module: nn.Module) -> None:
    """Freeze a module, but for adapters beside its products."""
    module.requires_grad_(False)
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Adapted(child))


class Model(nn.Module):
    """Adapted blocks on a frozen table of embeddings; the first block has no adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        for block in self.blocks[1:]:
            adapt(block)
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        with torch.no_grad():
            x = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Model()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
