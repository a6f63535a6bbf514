"""The axes of text encoders, encoder-decoders and speech, with the modelling code behind them."""

from tests.planner.huggingface.expectation import Expectation, biased, dims, each, one, weight

Expectations = tuple[Expectation, ...]

HEADS = "heads·head_dim"

# BertSelfAttention.forward: `hidden_shape = (*input_shape, -1, self.attention_head_size)`.
BERT_LAYER = (
    biased("attention.self.query", HEADS, "embed")
    + biased("attention.self.key", HEADS, "embed")
    + biased("attention.self.value", HEADS, "embed")
    + biased("attention.output.dense", "embed", HEADS)
    + biased("intermediate.dense", "ffn", "embed")
    + biased("output.dense", "embed", "ffn")
)

# BertLMPredictionHead: `self.decoder` is tied to the word embeddings; its bias is its own.
BERT: Expectations = (
    weight("bert.embeddings.word_embeddings", "vocab", "embed")
    + one("bert.embeddings.token_type_embeddings.weight", 1, "embed")
    + each("bert.encoder.layer", 2, BERT_LAYER)
    + one("cls.predictions.transform.dense.weight", 1, "embed")
    + dims("cls.predictions.bias", "vocab")
)

ROBERTA: Expectations = (
    weight("roberta.embeddings.word_embeddings", "vocab", "embed")
    + each("roberta.encoder.layer", 2, BERT_LAYER)
    + one("lm_head.dense.weight", 1, "embed")
    + dims("lm_head.bias", "vocab")
)

# DistilBertSelfAttention.forward: `hidden_shape = (*input_shape, -1, self.attention_head_size)`.
DISTILBERT: Expectations = (
    weight("distilbert.embeddings.word_embeddings", "vocab", "embed")
    + each(
        "distilbert.transformer.layer",
        2,
        biased("attention.q_lin", HEADS, "embed"),
        biased("attention.k_lin", HEADS, "embed"),
        biased("attention.v_lin", HEADS, "embed"),
        biased("attention.out_lin", "embed", HEADS),
        biased("ffn.lin1", "ffn", "embed"),
        biased("ffn.lin2", "embed", "ffn"),
    )
    + dims("vocab_projector.bias", "vocab")
)


def t5_attention(module: str) -> Expectations:
    """T5Attention.forward: `hidden_shape = (*input_shape, -1, self.key_value_proj_dim)`."""
    return (
        weight(f"{module}.q", HEADS, "embed")
        + weight(f"{module}.k", HEADS, "embed")
        + weight(f"{module}.v", HEADS, "embed")
        + weight(f"{module}.o", "embed", HEADS)
    )


def t5_ffn(module: str) -> Expectations:
    """T5DenseActDense.forward: `self.wo(self.dropout(self.act(self.wi(hidden_states))))`."""
    return weight(f"{module}.wi", "ffn", "embed") + weight(f"{module}.wo", "embed", "ffn")


# T5Attention.compute_bias: `values.permute([2, 0, 1]).unsqueeze(0)  # (1, num_heads, …)`; only
# block 0 has the table. `lm_head` is tied to `shared`.
T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
T5: Expectations = (
    weight("shared", "vocab", "embed")
    + one(f"encoder.{T5_BIAS}", 1, "heads")
    + one(f"decoder.{T5_BIAS}", 1, "heads")
    + each(
        "encoder.block", 2, t5_attention("layer.0.SelfAttention"), t5_ffn("layer.1.DenseReluDense")
    )
    + each(
        "decoder.block",
        2,
        t5_attention("layer.0.SelfAttention"),
        t5_attention("layer.1.EncDecAttention"),
        t5_ffn("layer.2.DenseReluDense"),
    )
)


def bart_attention(module: str) -> Expectations:
    """BartAttention.forward and WhisperAttention.forward: `.view((…, -1, self.head_dim))`."""
    return (
        biased(f"{module}.q_proj", HEADS, "embed")
        + weight(f"{module}.k_proj", HEADS, "embed")  # Whisper's key has no bias
        + biased(f"{module}.v_proj", HEADS, "embed")
        + biased(f"{module}.out_proj", "embed", HEADS)
    )


# BartEncoderLayer, BartDecoderLayer: `self.fc2(self.activation_fn(self.fc1(hidden_states)))`.
TWO_STACKS = each(
    "model.encoder.layers",
    2,
    bart_attention("self_attn"),
    biased("fc1", "ffn", "embed"),
    biased("fc2", "embed", "ffn"),
) + each(
    "model.decoder.layers",
    2,
    bart_attention("self_attn"),
    bart_attention("encoder_attn"),
    biased("fc1", "ffn", "embed"),
    biased("fc2", "embed", "ffn"),
)
BART: Expectations = (
    weight("model.shared", "vocab", "embed")
    + one("model.encoder.embed_positions.weight", 1, "embed")
    + TWO_STACKS
)

# WhisperPositionalEmbedding.forward: `self.weight[position_ids]`, an index, no embedding op;
# WhisperEncoder.forward: `inputs_embeds.permute(0, 2, 1)` makes conv2's channels the embedding.
WHISPER: Expectations = (
    weight("model.decoder.embed_tokens", "vocab", "embed")
    + one("model.decoder.embed_positions.weight", 1, "embed")
    + one("model.encoder.embed_positions.weight", 1, "embed")
    + weight("model.encoder.conv1", "channels", "channels.2")
    + weight("model.encoder.conv2", "embed", "channels")
    + TWO_STACKS
)

ENCODERS = {
    "BERT": BERT,
    "RoBERTa": ROBERTA,
    "DistilBERT": DISTILBERT,
    "T5": T5,
    "BART": BART,
    "Whisper": WHISPER,
}
