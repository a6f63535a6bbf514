"""Modules in a dict by numbers, with a forward of their own each, and one that all of them hold."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tests.field.blocks import VOCAB, WIDTH, token_batch, token_loss


class Mixer(nn.Module):
    """Decides in its __init__ which of its forwards is meant."""

    def __init__(self, norm: nn.Module, *, is_narrow: bool) -> None:
        super().__init__()
        self.norm = norm
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)
        self.forward = self.forward_halves if is_narrow else self.forward_whole

    def forward_whole(self, x: Tensor) -> Tensor:
        """Mix all of the features."""
        out: Tensor = self.narrow(functional.gelu(self.wide(self.norm(self.dropout(x)))))
        return out + x

    def forward_halves(self, x: Tensor) -> Tensor:
        """Mix them, and swap the halves."""
        first, second = self.forward_whole(x).chunk(2, dim=-1)
        return second * first.tanh() + x.mean(-1, keepdim=True)


class Parts(nn.ModuleDict):
    """Modules that are called in their order, as torchvision's backbones are."""

    def forward(self, x: Tensor) -> Tensor:
        """Call them all."""
        for module in self.values():
            x = module(x)
        return x


class Odd(nn.Module):
    """Six mixers under numbers as names, then one with halves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.shared = nn.LayerNorm(WIDTH)
        self.parts = Parts({str(i): Mixer(self.shared, is_narrow=False) for i in range(6)})
        self.last, self.head = Mixer(self.shared, is_narrow=True), nn.Linear(WIDTH // 2, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map tokens to logits."""
        out: Tensor = self.head(self.last(self.parts(self.embed(input_ids))))
        return out


def build_model() -> nn.Module:
    """Return the model."""
    return Odd()


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return token_batch(batch_size)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return token_loss(outputs, batch["labels"])
