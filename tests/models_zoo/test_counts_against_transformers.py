"""Published sizes have as many parameters as what `transformers` builds for their shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models_zoo.model_files import load

transformers = pytest.importorskip("transformers")


def gpt2(layers: int, heads: int, dim: int, places: int = 1024) -> Any:
    shape = {"n_layer": layers, "n_head": heads, "n_embd": dim, "n_positions": places}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))


def llama(layers: int, heads: int, dim: int, ffn: int, *, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        hidden_size=dim,
        intermediate_size=ffn,
        vocab_size=128256,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def bert(layers: int, heads: int, dim: int) -> Any:
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=dim,
        intermediate_size=4 * dim,
    )
    return transformers.BertForMaskedLM(config)


def t5(layers: int, heads: int, dim: int, ffn: int, head_dim: int = 64) -> Any:
    config = transformers.T5Config(
        num_layers=layers, num_heads=heads, d_model=dim, d_ff=ffn, d_kv=head_dim
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(layers: int, heads: int, dim: int, patch: int) -> Any:
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        hidden_size=dim,
        intermediate_size=4 * dim,
        patch_size=patch,
        num_labels=1000,
    )
    return transformers.ViTForImageClassification(config)


def resnet50() -> Any:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))


SHAPES: dict[tuple[str, str], Callable[[], Any]] = {
    ("gpt2", "124m"): lambda: gpt2(12, 12, 768),
    ("gpt2", "355m"): lambda: gpt2(24, 16, 1024),
    ("gpt2", "774m"): lambda: gpt2(36, 20, 1280),
    ("gpt2", "1.5b"): lambda: gpt2(48, 25, 1600),
    ("gpt2", "175b"): lambda: gpt2(96, 96, 12288, 2048),
    ("llama", "1b"): lambda: llama(16, 32, 2048, 8192, tied=True),
    ("llama", "8b"): lambda: llama(32, 32, 4096, 14336),
    ("llama", "70b"): lambda: llama(80, 64, 8192, 28672),
    ("llama", "405b"): lambda: llama(126, 128, 16384, 53248),
    ("bert", "base"): lambda: bert(12, 12, 768),
    ("bert", "large"): lambda: bert(24, 16, 1024),
    ("t5", "small"): lambda: t5(6, 8, 512, 2048),
    ("t5", "base"): lambda: t5(12, 12, 768, 3072),
    ("t5", "large"): lambda: t5(24, 16, 1024, 4096),
    ("t5", "3b"): lambda: t5(24, 32, 1024, 16384, 128),
    ("t5", "11b"): lambda: t5(24, 128, 1024, 65536, 128),
    ("vit", "b16"): lambda: vit(12, 12, 768, 16),
    ("vit", "l16"): lambda: vit(24, 16, 1024, 16),
    ("vit", "h14"): lambda: vit(32, 16, 1280, 14),
    ("resnet", "50"): resnet50,
}


@pytest.mark.parametrize(("name", "size"), SHAPES)
def test_a_size_has_the_parameters_of_the_same_shape_in_transformers(name: str, size: str) -> None:
    with torch.device("meta"):
        ours, theirs = load(name).build_model(size=size), SHAPES[name, size]()
    count, expected = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    assert count == expected
