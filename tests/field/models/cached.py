"""A Hugging Face T5 as it comes: its decoder fills a cache that training never reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

VOCAB, LENGTH = 50, 11


def build_model() -> nn.Module:
    """Return the model."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random sources and targets."""
    source, target = torch.randint(3, VOCAB, (2, batch_size, LENGTH))
    return {"input_ids": source, "labels": target}
