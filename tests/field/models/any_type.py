"""Any model type of transformers, made tiny by what its configuration calls its sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto import modeling_auto

SIZES = {
    "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim emb_dim": 48,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_kv_heads "
    "num_encoder_layers num_decoder_layers num_key_value_heads num_kv_head n_head_kv "
    "num_experts_per_tok num_experts_per_token top_k moe_k moe_topk mamba_expand "
    "num_feature_levels": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads": 6,
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp "
    "expert_ffn_hidden_size": 40,
    "vocab_size": 60,
    "max_position_embeddings n_positions max_source_positions max_target_positions image_size": 64,
    "head_dim d_kv kv_channels attention_head_size qk_nope_head_dim v_head_dim mamba_d_head "
    "linear_key_head_dim linear_value_head_dim index_head_dim num_groups": 8,
    "qk_rope_head_dim rotary_dim mamba_chunk_size chunk_size conv_kernel index_topk num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "num_conv_pos_embedding_groups": 4,
    "kv_lora_rank q_lora_rank lora_rank sliding_window attention_window mamba_d_state state_size "
    "num_conv_pos_embeddings": 16,
    "mamba_n_heads n_mamba_heads": 12,
    "mamba_d_ssm": 96,
    "pad_token_id n_group topk_group decoder_start_token_id n_shared_experts decoder_sparse_step "
    "first_k_dense_replace num_codebooks": 1,
    "bos_token_id eos_token_id linear_num_key_heads index_n_heads": 2,
    "num_kv_shared_layers hidden_size_per_layer_input": 0,
}
# What a name of a size alone does not tell: numbers that must fit to each other.
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "rotary_dim": 4},  # heads in four groups, as its TPUs had them
    "mobilebert": {"true_hidden_size": 24, "intra_bottleneck_size": 24, "embedding_size": 24},
    "mamba2": {"num_heads": 12, "n_groups": 4},
    "zamba2": {"mamba_headdim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "esm": {"pad_token_id": 1, "position_embedding_type": "rotary"},
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "reformer masked": {"is_decoder": False},
    "xmod": {"default_language": "en_XX"},
}
OPTIONAL = (
    "head_dim num_key_value_heads vocab_size n_routed_experts n_shared_experts num_experts_per_tok"
)
OFF = ("output_router_logits", "apply_spec_augment")  # the last draws with numpy
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "text": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "segments": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "sound": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
MASKED = ("mask_time_prob", "mask_feature_prob")  # shares of sound, drawn with numpy
LABELS, SEQ, PIXELS, SAMPLES, FRAMES = 5, 12, 64, 1600, 64
_WANTED = {name: size for names, size in SIZES.items() for name in names.split()}


def types_of(task: str) -> tuple[str, ...]:
    """Return the model types that transformers has for a task."""
    return tuple(getattr(modeling_auto, TASKS[task]))


def build_model(kind: str, task: str, cache: bool = False) -> nn.Module:
    """Build a tiny model of a type for a task; with a cache of keys where it comes with one."""
    config = _configured(kind, task, cache=cache)
    model: nn.Module = _class_of(kind, task)(config)
    return model


def example_batch(batch_size: int, kind: str, task: str) -> dict[str, torch.Tensor]:
    """Make random rows, with labels, for a task."""
    classes = torch.randint(LABELS, (batch_size,))
    if task in ("image", "segments"):
        places = (PIXELS, PIXELS) if task == "segments" else ()
        labels = torch.randint(LABELS, (batch_size, *places))
        return {"pixel_values": torch.randn(batch_size, 3, PIXELS, PIXELS), "labels": labels}
    if task in ("speech", "sound"):
        labels = classes if task == "sound" else torch.randint(3, 30, (batch_size, 3))
        return {**_recordings(batch_size, kind, task), "labels": labels}
    ids = torch.randint(3, _WANTED["vocab_size"], (batch_size, SEQ))
    ids[:, -1] = _WANTED["eos_token_id"]
    if task == "question":
        start, end = torch.randint(SEQ, (2, batch_size))
        return {"input_ids": ids, "start_positions": start, "end_positions": end}
    if task in ("text", "tokens"):
        labels = classes if task == "text" else torch.randint(LABELS, (batch_size, SEQ))
        return {"input_ids": ids, "labels": labels}
    labels = ids.clone()
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


def _recordings(batch_size: int, kind: str, task: str) -> dict[str, torch.Tensor]:
    """Return sound as waves, or as its frequencies over time, in the order that a type wants."""
    if _class_of(kind, task).main_input_name != "input_features":
        config = _configured(kind, task)  # of spectrograms, which are input_values, too
        sizes = [getattr(config, name, 0) for name in ("max_length", "num_mel_bins")]
        return {"input_values": torch.randn(batch_size, *(sizes if all(sizes) else [SAMPLES]))}
    config = _configured(kind, task)
    config = getattr(config, "encoder_config", config)
    names = ("feature_projection_input_dim", "input_dim", "num_mel_bins")
    wide = next(filter(None, (getattr(config, name, None) for name in names)))
    if hasattr(config, "max_source_positions") and not hasattr(config, names[0]):  # as Whisper has
        return {"input_features": torch.randn(batch_size, wide, 2 * config.max_source_positions)}
    mask = torch.ones(batch_size, FRAMES, dtype=torch.long)
    return {"input_features": torch.randn(batch_size, FRAMES, wide), "attention_mask": mask}


def _class_of(kind: str, task: str) -> Any:
    name = getattr(modeling_auto, TASKS[task])[kind]
    return getattr(transformers, name[0] if isinstance(name, (list, tuple)) else name)


def _configured(kind: str, task: str, *, cache: bool = False) -> Any:
    """Return the configuration of a tiny model; of text alone, where that is what a task has."""
    config = AutoConfig.for_model(kind)
    wanted = _class_of(kind, task).config_class
    if wanted is not None and not isinstance(config, wanted):
        config = config.get_text_config()
    config = _tiny(config, OFF if cache else (*OFF, "use_cache"))
    config.num_labels = 2 if task == "question" else LABELS  # where an answer begins, and ends
    config._experts_implementation = "batched_mm"  # of static shapes
    if task in ("seq2seq", "speech"):
        config.decoder_start_token_id = _WANTED["decoder_start_token_id"]
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
        config.vocab_size = _WANTED["vocab_size"]
    if task == "text" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # the last token that is none is classified
    for name, value in {**OWN.get(kind, {}), **OWN.get(f"{kind} {task}", {})}.items():
        setattr(config, name, value)
    return config


def _tiny(config: Any, off: tuple[str, ...]) -> Any:
    """Return a configuration of the same class with small sizes, no dropout, and things off."""
    config.allow_global_per_layer_attribute_access = True
    given = {name: size for name, size in _sizes(config, off) if size is not None}
    if "kv_lora_rank" in given:  # latent attention has keys for every head
        given["num_key_value_heads"] = _WANTED["num_attention_heads"]
        given["head_dim"] = _WANTED["qk_rope_head_dim"]
    try:
        made = type(config)(**given)
    except Exception:  # one that takes some of them later only
        made = config
        for name, value in given.items():
            setattr(made, name, value)
    made.allow_global_per_layer_attribute_access = True
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(made, name, None)
        if isinstance(kinds, list) and len(kinds) > 2:
            setattr(made, name, [kinds[0], kinds[-1]])
    return made


def _sizes(config: Any, off: tuple[str, ...]) -> Any:
    for name in vars(config):
        value = getattr(config, name, None)
        if isinstance(value, PretrainedConfig):
            yield name, _tiny(value, off)
        elif isinstance(value, bool):
            yield name, False if name in off else None
        elif isinstance(value, float) and ("drop" in name or name in MASKED):
            yield name, 0.0
        elif isinstance(value, int) or (value is None and name in OPTIONAL.split()):
            yield name, _WANTED.get(name)
        elif isinstance(value, (list, tuple)) and all(isinstance(one, int) for one in value):
            yield name, _listed(name, value)


def _listed(name: str, value: Any) -> Any:
    """Return small sizes of the stages of a model; wider and wider ones for widths."""
    if name == "depths":
        return type(value)(1 for _ in value)
    if name in ("hidden_sizes", "embed_dims", "hidden_dims"):
        return type(value)(24 * (i + 1) for i in range(len(value)))
    if name in ("conv_dim", "tdnn_dim"):
        return type(value)(32 for _ in value)
    return type(value)(2 for _ in value) if name in ("num_attention_heads", "num_heads") else None
