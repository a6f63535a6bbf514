"""Language models on rows of which some places do not count, and a captioner of images."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.codegen import unlike_rows
from tests.codegen.plain_models.rows import Row, Rows, example_of, words_row

LENGTH, WORDS = 16, 64


_SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
    "use_cache": False,
}  # fmt: skip


def build_model(kind: str) -> nn.Module:
    """Return a model that returns its loss."""
    if kind == "qwen3":
        qwen3: nn.Module = Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=12))
        return qwen3
    if kind == "mixtral":
        routed = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
        mixtral: nn.Module = MixtralForCausalLM(MixtralConfig(**_SIZES, **experts, **routed))
        return mixtral
    return unlike_rows.build_model(kind)


def _row(numbers: Generator, kind: str) -> Row:
    row = words_row(numbers, vocabulary=WORDS, length=LENGTH)
    if kind == "captioner":
        image = torch.randn(unlike_rows.IMAGE, generator=numbers)
        return {"pixel_values": image, "labels": row["labels"]}
    # A mean of means is one mean here: what Mixtral's parts have is then told by its routers alone.
    return dict.fromkeys(row, row["input_ids"]) if kind == "mixtral" else row


def example_batch(batch_size: int, kind: str) -> dict[str, Tensor]:
    """Return rows of a kind."""
    return example_of(lambda numbers: _row(numbers, kind), batch_size)


def build_dataset(kind: str) -> Rows:
    """Return the rows of a kind."""
    return Rows(lambda numbers: _row(numbers, kind))
