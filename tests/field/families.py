"""The families of the trial: those of the foundation, and some that are built differently."""

from __future__ import annotations

from types import MappingProxyType

import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertLMHeadModel,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
)

from tests.field.unlike import UNLIKE
from tests.planner.huggingface.decoders import GROUPED, causal_batch
from tests.planner.huggingface.encoders import BERT_LIKE, masked_batch
from tests.planner.huggingface.families import FAMILIES
from tests.planner.huggingface.family import Batch, Family
from tests.planner.huggingface.vision import CLASSES, wide_batch

NO_SIZES: MappingProxyType[str, tuple[int, ...]] = MappingProxyType({})


def attended_batch(batch_size: int) -> Batch:
    """Makes a causal batch, and states of an encoder that its decoder attends to."""
    states = torch.randn(batch_size, 9, BERT_LIKE["hidden_size"])
    return {**causal_batch(batch_size), "encoder_hidden_states": states}


DIFFERENT = (
    Family(
        name="Mixtral",  # experts, all of them computed for every token
        model_class=MixtralForCausalLM,
        config=MixtralConfig(
            **GROUPED,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="batched_mm",
        ),
        inputs=causal_batch,
        sizes=NO_SIZES,
    ),
    Family(
        name="ALBERT",  # one layer, called three times
        model_class=AlbertForMaskedLM,
        config=AlbertConfig(**{**BERT_LIKE, "num_hidden_layers": 3}, embedding_size=20),
        inputs=masked_batch,
        sizes=NO_SIZES,
    ),
    Family(
        name="DeBERTa-v2",  # attention to relative positions
        model_class=DebertaV2ForMaskedLM,
        config=DebertaV2Config(
            **BERT_LIKE,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        ),
        inputs=masked_batch,
        sizes=NO_SIZES,
    ),
    Family(
        name="BERT (cross-attention)",  # a decoder whose layers attend to an encoder's states
        model_class=BertLMHeadModel,
        config=BertConfig(**BERT_LIKE, is_decoder=True, add_cross_attention=True, use_cache=False),
        inputs=attended_batch,
        sizes=NO_SIZES,
    ),
    Family(
        name="MobileNetV2",  # depthwise convolutions
        model_class=MobileNetV2ForImageClassification,
        config=MobileNetV2Config(depth_multiplier=0.25, num_labels=CLASSES),
        inputs=wide_batch,
        sizes=NO_SIZES,
    ),
)

TRIED: tuple[Family, ...] = (*FAMILIES, *DIFFERENT, *UNLIKE)


def family_named(name: str) -> Family:
    """Return the family of a name."""
    return next(family for family in TRIED if family.name == name)
