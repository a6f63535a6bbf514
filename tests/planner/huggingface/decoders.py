"""Decoder-only language models as tiny families."""

from types import MappingProxyType
from typing import Any

from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.planner.huggingface.family import Batch, Family, token_ids

VOCAB, EMBED, HEADS, KV_HEADS, GROUP, FFN, LENGTH, POSITIONS, LAYERS = (
    99,
    48,
    6,
    2,
    3,
    80,
    14,
    21,
    2,
)
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FREE_HEAD_DIM = 10  # heads · head_dim ≠ embed, where the architecture lets us


def causal_batch(batch_size: int) -> Batch:
    """Makes token numbers and the same numbers as labels."""
    ids = token_ids(batch_size, LENGTH, VOCAB)
    return {"input_ids": ids, "labels": ids.clone()}


def masked_causal_batch(batch_size: int) -> Batch:
    """Makes a causal batch as a tokenizer does, with its attention mask."""
    batch = causal_batch(batch_size)
    return {**batch, "attention_mask": batch["input_ids"].ne(0).long()}


def short_causal_batch(batch_size: int) -> Batch:
    """Makes a causal batch of few tokens, for a model whose graph grows with their number."""
    ids = token_ids(batch_size, 5, VOCAB)
    return {"input_ids": ids, "labels": ids.clone()}


def sizes(**axes: int) -> MappingProxyType[str, tuple[int, ...]]:
    """Gives each axis its one size; vocabulary, embedding and ffn are those of this file."""
    common = {"vocab": VOCAB, "embed": EMBED, "ffn": FFN}
    return MappingProxyType({name: (size,) for name, size in {**common, **axes}.items()})


GROUPED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
    "use_cache": False,
    **SPECIAL_TOKENS,
}
OF_FREE_HEAD_DIM = sizes(kv_heads=KV_HEADS, group=GROUP, head_dim=FREE_HEAD_DIM)
OF_DERIVED_HEAD_DIM = sizes(kv_heads=KV_HEADS, group=GROUP, head_dim=EMBED // HEADS)
OF_EQUAL_HEADS = sizes(heads=HEADS, head_dim=EMBED // HEADS)

DECODERS = (
    Family(
        name="GPT-2",
        model_class=GPT2LMHeadModel,
        config=GPT2Config(
            vocab_size=VOCAB,
            n_positions=POSITIONS,
            n_embd=EMBED,
            n_layer=LAYERS,
            n_head=HEADS,
            n_inner=FFN,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=OF_EQUAL_HEADS,
    ),
    Family(
        name="Llama",
        model_class=LlamaForCausalLM,
        config=LlamaConfig(**GROUPED, head_dim=FREE_HEAD_DIM),
        inputs=causal_batch,
        sizes=OF_FREE_HEAD_DIM,
    ),
    Family(
        name="Mistral",
        model_class=MistralForCausalLM,
        config=MistralConfig(**GROUPED, head_dim=FREE_HEAD_DIM, sliding_window=9),
        inputs=causal_batch,
        sizes=OF_FREE_HEAD_DIM,
    ),
    Family(
        name="Qwen2",
        model_class=Qwen2ForCausalLM,
        config=Qwen2Config(**GROUPED),
        inputs=masked_causal_batch,
        sizes=OF_DERIVED_HEAD_DIM,
    ),
    Family(
        name="Qwen3",
        model_class=Qwen3ForCausalLM,
        config=Qwen3Config(**GROUPED, head_dim=FREE_HEAD_DIM),
        inputs=causal_batch,
        sizes=OF_FREE_HEAD_DIM,
    ),
    Family(
        name="Gemma2",
        model_class=Gemma2ForCausalLM,
        config=Gemma2Config(**GROUPED, head_dim=FREE_HEAD_DIM, sliding_window=9),
        inputs=causal_batch,
        sizes=OF_FREE_HEAD_DIM,
    ),
    Family(
        name="Phi-3",
        model_class=Phi3ForCausalLM,
        config=Phi3Config(**GROUPED, original_max_position_embeddings=POSITIONS),
        inputs=causal_batch,
        sizes=OF_DERIVED_HEAD_DIM,
    ),
    Family(
        name="OPT",
        model_class=OPTForCausalLM,
        config=OPTConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            ffn_dim=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=OF_EQUAL_HEADS,
    ),
    Family(
        name="BLOOM",  # its ffn is always four times its embedding
        model_class=BloomForCausalLM,
        config=BloomConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            n_layer=LAYERS,
            n_head=HEADS,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=sizes(heads=HEADS, head_dim=EMBED // HEADS, ffn=4 * EMBED),
    ),
    Family(
        name="Falcon (multi-query)",  # four heads: with six, heads + 2 would be head_dim
        model_class=FalconForCausalLM,
        config=FalconConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            multi_query=True,
            ffn_hidden_size=FFN,
            max_position_embeddings=POSITIONS,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=sizes(heads=4, head_dim=EMBED // 4),
    ),
    Family(
        name="Falcon (new decoder architecture)",
        model_class=FalconForCausalLM,
        config=FalconConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_kv_heads=KV_HEADS,
            new_decoder_architecture=True,
            ffn_hidden_size=FFN,
            max_position_embeddings=POSITIONS,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=OF_DERIVED_HEAD_DIM,
    ),
    Family(
        name="GPT-NeoX",  # a quarter of head_dim is rotated, and that part has two halves
        model_class=GPTNeoXForCausalLM,
        config=GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=2 * EMBED,
            intermediate_size=FFN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes=sizes(embed=2 * EMBED, heads=HEADS, head_dim=2 * EMBED // HEADS),
    ),
    Family(
        name="Mamba",  # its inner axis is twice its embedding
        model_class=MambaForCausalLM,
        config=MambaConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            state_size=11,
            num_hidden_layers=LAYERS,
            time_step_rank=7,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=short_causal_batch,
        sizes=sizes(inner=2 * EMBED, state=11, rank=7),
    ),
)
