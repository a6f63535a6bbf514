"""A Hugging Face Llama whose batch is padded: rows of unequal length, labels of -100."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH = 50, 11


def build_model() -> nn.Module:
    """Return the model."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random rows, each shorter than the one before it, in turns of four."""
    ids = torch.randint(3, VOCAB, (batch_size, LENGTH))
    ends = LENGTH - 2 * (torch.arange(batch_size) % 4)
    mask = torch.arange(LENGTH) < ends[:, None]
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
