"""The axes of decoder-only models, each with the line of modelling code that makes them so."""

from tests.planner.huggingface.expectation import Expectation, biased, dims, each, one, weight

Expectations = tuple[Expectation, ...]

QUERY = "kv_heads·group·head_dim"
KEY = "kv_heads·head_dim"
HEADS = "heads·head_dim"

# `hidden_shape = (*input_shape, -1, self.head_dim)` splits every projection, and
# `hidden_states[:, :, None, :, :].expand(…, n_rep, …)` in repeat_kv makes a query head
# one of `group` that share a key head, the key head outermost.
GROUPED_ATTENTION = (
    weight("self_attn.q_proj", QUERY, "embed")
    + weight("self_attn.k_proj", KEY, "embed")
    + weight("self_attn.v_proj", KEY, "embed")
    + weight("self_attn.o_proj", "embed", QUERY)
)
# `down_proj(act_fn(gate_proj(x)) * up_proj(x))`
GATED_FFN = (
    weight("mlp.gate_proj", "ffn", "embed")
    + weight("mlp.up_proj", "ffn", "embed")
    + weight("mlp.down_proj", "embed", "ffn")
)
EMBEDDING = weight("model.embed_tokens", "vocab", "embed")
HEAD = weight("lm_head", "vocab", "embed")
LLAMA = EMBEDDING + each("model.layers", 2, GROUPED_ATTENTION, GATED_FFN) + HEAD

# GPT2Attention.forward: `self.c_attn(hidden_states).split(self.split_size, dim=2)`, then
# `.view((*key_states.shape[:-1], -1, self.head_dim))`; Conv1D keeps (in, out).
GPT2: Expectations = (
    weight("transformer.wte", "vocab", "embed")
    + one("transformer.wpe.weight", 1, "embed")
    + each(
        "transformer.h",
        2,
        dims("attn.c_attn.weight", "embed", f"[{HEADS} | {HEADS} | {HEADS}]"),
        dims("attn.c_attn.bias", f"[{HEADS} | {HEADS} | {HEADS}]"),
        dims("attn.c_proj.weight", HEADS, "embed"),
        dims("mlp.c_fc.weight", "embed", "ffn"),
        dims("mlp.c_proj.weight", "ffn", "embed"),
    )
)

# Qwen2Attention.__init__: `bias=True` on q, k and v.
QWEN2: Expectations = (
    LLAMA
    + each("model.layers", 2, dims("self_attn.q_proj.bias", QUERY))
    + each("model.layers", 2, dims("self_attn.k_proj.bias", KEY))
)

# Qwen3Attention.forward: `self.q_norm(self.q_proj(hidden_states).view(hidden_shape))`.
QWEN3: Expectations = LLAMA + each(
    "model.layers",
    2,
    weight("self_attn.q_norm", "head_dim"),
    weight("self_attn.k_norm", "head_dim"),
)

# Gemma2: `lm_head.weight` is `model.embed_tokens.weight`.
GEMMA2: Expectations = EMBEDDING + each("model.layers", 2, GROUPED_ATTENTION, GATED_FFN)

# Phi3Attention.forward: `qkv[..., :query_pos]`, `qkv[..., query_pos : query_pos + …]`,
# `qkv[..., query_pos + … :]`; Phi3MLP.forward: `gate, up_states = up_states.chunk(2, dim=-1)`.
PHI3: Expectations = (
    EMBEDDING
    + each(
        "model.layers",
        2,
        weight("self_attn.qkv_proj", f"[{QUERY} | {KEY} | {KEY}]", "embed"),
        weight("self_attn.o_proj", "embed", QUERY),
        weight("mlp.gate_up_proj", "[ffn | ffn]", "embed"),
        weight("mlp.down_proj", "embed", "ffn"),
    )
    + HEAD
)

# OPTAttention.forward: `.view(bsz, -1, self.num_heads, self.head_dim)`.
OPT: Expectations = (
    weight("model.decoder.embed_tokens", "vocab", "embed")
    + one("model.decoder.embed_positions.weight", 1, "embed")
    + each(
        "model.decoder.layers",
        2,
        biased("self_attn.q_proj", HEADS, "embed"),
        biased("self_attn.k_proj", HEADS, "embed"),
        biased("self_attn.v_proj", HEADS, "embed"),
        biased("self_attn.out_proj", "embed", HEADS),
        biased("fc1", "ffn", "embed"),
        biased("fc2", "embed", "ffn"),
    )
)

# BloomAttention._reshape: `fused_qkv.view(batch_size, seq_length, num_heads, 3, head_dim)`.
BLOOM: Expectations = weight("transformer.word_embeddings", "vocab", "embed") + each(
    "transformer.h",
    2,
    biased("self_attention.query_key_value", "heads·3·head_dim", "embed"),
    biased("self_attention.dense", "embed", HEADS),
    biased("mlp.dense_h_to_4h", "ffn", "embed"),
    biased("mlp.dense_4h_to_h", "embed", "ffn"),
)

# FalconAttention._split_heads: `fused_qkv.view(…, self.num_heads + 2, self.head_dim)`, then
# `fused_qkv[..., :-2, :]`, `fused_qkv[..., [-2], :]`, `fused_qkv[..., [-1], :]`: the query heads,
# one key head, one value head.
FALCON_MULTI_QUERY: Expectations = weight("transformer.word_embeddings", "vocab", "embed") + each(
    "transformer.h",
    2,
    weight("self_attention.query_key_value", "[heads | 1 | 1]·head_dim", "embed"),
    weight("self_attention.dense", "embed", HEADS),
    weight("mlp.dense_h_to_4h", "ffn", "embed"),
    weight("mlp.dense_4h_to_h", "embed", "ffn"),
)

# FalconAttention._split_heads: `fused_qkv.view(batch, seq_len, -1, num_heads // num_kv_heads + 2,
# self.head_dim)`, then `qkv[:, :, :, :-2]`, `qkv[:, :, :, [-2]]`, `qkv[:, :, :, [-1]]` and
# `x.flatten(2, 3)`: the key head outermost, its group of query heads, one key and one value inside.
FALCON_NEW: Expectations = weight("transformer.word_embeddings", "vocab", "embed") + each(
    "transformer.h",
    2,
    weight("self_attention.query_key_value", "kv_heads·[group | 1 | 1]·head_dim", "embed"),
    weight("self_attention.dense", "embed", QUERY),
    weight("mlp.dense_h_to_4h", "ffn", "embed"),
    weight("mlp.dense_4h_to_h", "embed", "ffn"),
)

# GPTNeoXAttention.forward: `hidden_shape = (*input_shape, -1, 3 * self.head_size)`, then
# `qkv.chunk(3, dim=-1)`: the head outermost.
NEOX_QKV = "heads·[head_dim | head_dim | head_dim]"
GPT_NEOX: Expectations = (
    weight("gpt_neox.embed_in", "vocab", "embed")
    + each(
        "gpt_neox.layers",
        2,
        biased("attention.query_key_value", NEOX_QKV, "embed"),
        biased("attention.dense", "embed", HEADS),
        biased("mlp.dense_h_to_4h", "ffn", "embed"),
        biased("mlp.dense_4h_to_h", "embed", "ffn"),
    )
    + HEAD
)

# MambaMixer.forward: `projected_states.chunk(2, dim=1)`, joined again by
# `scan_output * F.silu(z)`; `torch.split(self.x_proj(…), [rank, state, state], dim=-1)`.
MAMBA: Expectations = weight("backbone.embeddings", "vocab", "embed") + each(
    "backbone.layers",
    2,
    weight("mixer.in_proj", "[inner | inner]", "embed"),
    biased("mixer.conv1d", "inner"),
    weight("mixer.x_proj", "[rank | state | state]", "inner"),
    biased("mixer.dt_proj", "inner", "rank"),
    dims("mixer.A_log", "inner", "state"),
    dims("mixer.D", "inner"),
    weight("mixer.out_proj", "embed", "inner"),
)

DECODERS = {
    "GPT-2": GPT2,
    "Llama": LLAMA,
    "Mistral": LLAMA,
    "Qwen2": QWEN2,
    "Qwen3": QWEN3,
    "Gemma2": GEMMA2,
    "Phi-3": PHI3,
    "OPT": OPT,
    "BLOOM": BLOOM,
    "Falcon (multi-query)": FALCON_MULTI_QUERY,
    "Falcon (new decoder architecture)": FALCON_NEW,
    "GPT-NeoX": GPT_NEOX,
    "Mamba": MAMBA,
}
