"""Families that are built unlike those of the foundation, each in a way that once went wrong."""

from __future__ import annotations

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BitConfig,
    BitForImageClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FNetConfig,
    FNetForMaskedLM,
    FunnelConfig,
    FunnelForMaskedLM,
    LiltConfig,
    LiltForTokenClassification,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MobileViTV2Config,
    MobileViTV2ForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    XLNetConfig,
    XLNetLMHeadModel,
)

from tests.planner.huggingface.decoders import GROUPED, SPECIAL_TOKENS, causal_batch
from tests.planner.huggingface.encoders import (
    BERT_LIKE,
    EMBED,
    FFN,
    FREE_HEAD_DIM,
    HEADS,
    VOCAB,
    masked_batch,
    translation_batch,
)
from tests.planner.huggingface.family import Batch, Family
from tests.planner.huggingface.vision import CLASSES, pixels, wide_batch

LABELS = 5
BOXES = 50


def many_labels_batch(batch_size: int) -> Batch:
    """Makes text of which several labels are true at once."""
    labels = torch.randint(0, 2, (batch_size, LABELS)).float()
    return {**masked_batch(batch_size), "labels": labels}


def layout_batch(batch_size: int) -> Batch:
    """Makes text with a box on the page and a label for every token."""
    batch = masked_batch(batch_size)
    corners = torch.randint(0, BOXES // 2, (*batch["input_ids"].shape, 2))
    boxes = torch.cat([corners, corners + BOXES // 4], dim=-1)
    return {**batch, "bbox": boxes, "labels": torch.randint(0, LABELS, corners.shape[:2])}


def large_batch(batch_size: int) -> Batch:
    """Makes large square pictures with one class each."""
    labels = torch.randint(0, CLASSES, (batch_size,))
    return {"pixel_values": pixels(batch_size, (64, 64)), "labels": labels}


def spoken_batch(batch_size: int) -> Batch:
    """Makes sounds and the letters spoken, of which some are padding."""
    labels = torch.randint(1, VOCAB, (batch_size, 5))
    labels[0, 3:] = -100
    return {"input_values": torch.randn(batch_size, 400), "labels": labels}


UNLIKE = (
    Family(
        name="DeepSeek-V3",  # latent attention, keys written part by part
        model_class=DeepseekV3ForCausalLM,
        config=DeepseekV3Config(
            **{**GROUPED, "num_key_value_heads": GROUPED["num_attention_heads"]},
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            q_lora_rank=20,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=10,
            experts_implementation="batched_mm",
        ),
        inputs=causal_batch,
        sizes={},
    ),
    Family(
        name="Llama 4",  # each token repeated for every expert
        model_class=Llama4ForCausalLM,
        config=Llama4TextConfig(
            **GROUPED,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=FFN,
            head_dim=8,
            interleave_moe_layer_step=2,
            attention_chunk_size=8,
            experts_implementation="batched_mm",
        ),
        inputs=causal_batch,
        sizes={},
    ),
    Family(
        name="Mixtral (grouped)",  # tokens sorted by their expert, as transformers does by itself
        model_class=MixtralForCausalLM,
        config=MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
        inputs=causal_batch,
        sizes={},
    ),
    Family(
        name="Mamba-2",  # a scan in chunks, groups repeated for heads
        model_class=Mamba2ForCausalLM,
        config=Mamba2Config(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            state_size=8,
            num_heads=6,
            head_dim=16,
            n_groups=2,
            num_hidden_layers=2,
            chunk_size=4,
            use_cache=False,
            **SPECIAL_TOKENS,
        ),
        inputs=causal_batch,
        sizes={},
    ),
    Family(
        name="T5 (cached)",  # as it comes: the decoder fills a cache that training never reads
        model_class=T5ForConditionalGeneration,
        config=T5Config(
            vocab_size=VOCAB,
            d_model=EMBED,
            d_kv=FREE_HEAD_DIM,
            d_ff=FFN,
            num_layers=2,
            num_heads=HEADS,
            decoder_start_token_id=0,
        ),
        inputs=translation_batch,
        sizes={},
    ),
    Family(
        name="XLNet",  # sequence first, heads by einsum, parameters from torch.FloatTensor
        model_class=XLNetLMHeadModel,
        config=XLNetConfig(
            vocab_size=VOCAB,
            d_model=EMBED,
            n_layer=2,
            n_head=HEADS,
            d_inner=FFN,
            use_mems_train=False,
            **SPECIAL_TOKENS,
        ),
        inputs=masked_batch,
        sizes={},
    ),
    Family(
        name="Funnel",  # a sequence that is pooled and widened again
        model_class=FunnelForMaskedLM,
        config=FunnelConfig(
            vocab_size=VOCAB,
            d_model=EMBED,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            n_head=HEADS,
            d_head=8,
            d_inner=FFN,
        ),
        inputs=masked_batch,
        sizes={},
    ),
    Family(
        name="FNet",  # Fourier transforms, complex numbers
        model_class=FNetForMaskedLM,
        config=FNetConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            intermediate_size=FFN,
            num_hidden_layers=2,
            max_position_embeddings=BERT_LIKE["max_position_embeddings"],
        ),
        inputs=causal_batch,
        sizes={},
    ),
    Family(
        name="LiLT",  # two streams, of which the last layer needs one
        model_class=LiltForTokenClassification,
        config=LiltConfig(
            **BERT_LIKE, channel_shrink_ratio=2, max_2d_position_embeddings=BOXES, num_labels=LABELS
        ),
        inputs=layout_batch,
        sizes={},
    ),
    Family(
        name="BERT (several labels)",
        model_class=BertForSequenceClassification,
        config=BertConfig(
            **BERT_LIKE, num_labels=LABELS, problem_type="multi_label_classification"
        ),
        inputs=many_labels_batch,
        sizes={},
    ),
    Family(
        name="BiT",  # standardised weights, group norms
        model_class=BitForImageClassification,
        config=BitConfig(
            embedding_size=16,
            hidden_sizes=[32, 48],
            depths=[1, 2],
            num_groups=4,
            num_labels=CLASSES,
        ),
        inputs=wide_batch,
        sizes={},
    ),
    Family(
        name="MobileViTV2",  # pictures unfolded and folded again
        model_class=MobileViTV2ForImageClassification,
        config=MobileViTV2Config(image_size=64, width_multiplier=0.25, num_labels=CLASSES),
        inputs=large_batch,
        sizes={},
    ),
    Family(
        name="Wav2Vec2 (CTC)",  # a loss that adds rows up and selects by a mask
        model_class=Wav2Vec2ForCTC,
        config=Wav2Vec2Config(
            **{k: v for k, v in BERT_LIKE.items() if k != "max_position_embeddings"},
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            layerdrop=0.0,
        ),
        inputs=spoken_batch,
        sizes={},
    ),
)
