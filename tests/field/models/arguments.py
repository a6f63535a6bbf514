"""A model with optional arguments, some given, some not, and arguments that are no tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.field.blocks import VOCAB, WIDTH, Block, token_batch, token_loss


class Arguments(nn.Module):
    """Blocks that are told how to scale and which way to go."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self,
        input_ids: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        mode: str = "plain",
        doubles: bool = False,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the loss with labels, and logits without."""
        x = self.embed(input_ids) * scale
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        for block in self.blocks:
            x = block(x) * 2 if doubles else block(x)
        logits = self.head(-x if mode == "negative" else x)
        return logits if labels is None else (token_loss(logits, labels), logits)


def build_model() -> nn.Module:
    """Return the model."""
    return Arguments()


def example_batch(batch_size: int) -> dict[str, Any]:
    """Return random tokens, and how to go."""
    return {**token_batch(batch_size), "scale": 0.5, "mode": "negative", "doubles": True}
