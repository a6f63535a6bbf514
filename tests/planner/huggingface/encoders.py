"""Encoders of text, encoder-decoders and speech as tiny families."""

from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from tests.planner.huggingface.family import Batch, Family, token_ids

VOCAB, EMBED, HEADS, FFN, LENGTH, TARGET_LENGTH, POSITIONS, LAYERS = 99, 48, 6, 80, 14, 9, 21, 2
HEAD_DIM, FREE_HEAD_DIM = EMBED // HEADS, 10
DECODER_HEADS, DECODER_FFN = 4, 88  # apart from the encoder's where the family lets us
MELS, FRAMES = 20, 26


def masked_batch(batch_size: int) -> Batch:
    """Makes token numbers, their attention mask, and a label at every place."""
    ids = token_ids(batch_size, LENGTH, VOCAB)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": ids.clone()}


def translation_batch(batch_size: int) -> Batch:
    """Makes source tokens with their mask, and shorter target tokens as labels."""
    target = token_ids(batch_size, TARGET_LENGTH, VOCAB)
    return {**masked_batch(batch_size), "labels": target}


def speech_batch(batch_size: int) -> Batch:
    """Makes mel features and the tokens spoken."""
    labels = token_ids(batch_size, TARGET_LENGTH, VOCAB)
    return {"input_features": torch.randn(batch_size, MELS, FRAMES), "labels": labels}


def sizes(**axes: int | tuple[int, ...]) -> MappingProxyType[str, tuple[int, ...]]:
    """Gives each axis its sizes; those of this file where none are given."""
    common = {"vocab": VOCAB, "embed": EMBED, "ffn": FFN, "heads": HEADS, "head_dim": HEAD_DIM}
    return MappingProxyType(
        {
            name: size if isinstance(size, tuple) else (size,)
            for name, size in {**common, **axes}.items()
        }
    )


BERT_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
}
TWO_STACKS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": EMBED,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": DECODER_HEADS,
    "encoder_ffn_dim": FFN,
    "decoder_ffn_dim": DECODER_FFN,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
OF_TWO_STACKS = sizes(
    heads=(HEADS, DECODER_HEADS),
    head_dim=(HEAD_DIM, EMBED // DECODER_HEADS),
    ffn=(FFN, DECODER_FFN),
    channels=(MELS, EMBED),
)

ENCODERS = (
    Family(
        name="BERT",
        model_class=BertForMaskedLM,
        config=BertConfig(**BERT_LIKE),
        inputs=masked_batch,
        sizes=sizes(),
    ),
    Family(
        name="RoBERTa",
        model_class=RobertaForMaskedLM,
        config=RobertaConfig(**BERT_LIKE),
        inputs=masked_batch,
        sizes=sizes(),
    ),
    Family(
        name="DistilBERT",
        model_class=DistilBertForMaskedLM,
        config=DistilBertConfig(
            vocab_size=VOCAB,
            dim=EMBED,
            hidden_dim=FFN,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_position_embeddings=POSITIONS,
        ),
        inputs=masked_batch,
        sizes=sizes(),
    ),
    Family(
        name="T5",
        model_class=T5ForConditionalGeneration,
        config=T5Config(
            vocab_size=VOCAB,
            d_model=EMBED,
            d_kv=FREE_HEAD_DIM,
            d_ff=FFN,
            num_layers=LAYERS,
            num_heads=HEADS,
            relative_attention_num_buckets=16,
            decoder_start_token_id=0,
            use_cache=False,
        ),
        inputs=translation_batch,
        sizes=sizes(head_dim=FREE_HEAD_DIM),
    ),
    Family(
        name="BART",
        model_class=BartForConditionalGeneration,
        config=BartConfig(**TWO_STACKS, max_position_embeddings=POSITIONS),
        inputs=translation_batch,
        sizes=OF_TWO_STACKS,
    ),
    Family(
        name="Whisper",  # the convolutions halve the frames; the encoder wants exactly that length
        model_class=WhisperForConditionalGeneration,
        config=WhisperConfig(
            **TWO_STACKS,
            num_mel_bins=MELS,
            max_source_positions=FRAMES // 2,
            max_target_positions=POSITIONS,
        ),
        inputs=speech_batch,
        sizes=OF_TWO_STACKS,
    ),
)
