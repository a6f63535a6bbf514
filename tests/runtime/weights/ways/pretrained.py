"""Models of transformers that begin from a folder."""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@cache
def saved(folder: Path, name: str) -> Path:
    """Save a small model of transformers, of a seed, unless it is there."""
    import transformers as hf

    place = folder / name
    if not place.exists():
        sizes = {"initializer_range": 0.1, **SIZES}
        kinds = {
            "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**sizes)),
            "sharded": (hf.LlamaForCausalLM, hf.LlamaConfig(**sizes, dtype="bfloat16")),
            "gpt2": (
                hf.GPT2LMHeadModel,
                hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
            ),
            "mixtral": (
                hf.MixtralForCausalLM,
                hf.MixtralConfig(**sizes, num_local_experts=2),
            ),
            "bert": (hf.BertModel, hf.BertConfig(**sizes)),
        }
        kind, config = kinds[name]
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = kind(config)
        size = "20KB" if name == "sharded" else "5GB"
        own = folder / f".{name}-{os.getpid()}"  # several ranks may save it at once
        model.to(config.dtype or torch.float32).save_pretrained(own, max_shard_size=size)
        with suppress(OSError):  # another rank was first
            own.rename(place)
    return place


def _read(
    name: str, kind: str = "AutoModelForCausalLM", *, known: bool = False, **options: Any
) -> Any:
    def build(folder: Path) -> nn.Module:
        import transformers as hf

        place = folder / name if known else saved(folder, name)
        model: nn.Module = getattr(hf, kind).from_pretrained(place, **options)
        return model

    return build


def _resized(folder: Path) -> nn.Module:
    model: Any = _read("gpt2")(folder)
    model.resize_token_embeddings(70, mean_resizing=False)
    return model  # type: ignore[no-any-return]


def _from_bin(folder: Path) -> nn.Module:
    place = folder / "bin"
    if not place.exists():
        model: Any = _read("llama")(folder)
        model.config.save_pretrained(place)
        torch.save(model.state_dict(), place / "pytorch_model.bin")
    return _read("bin", known=True)(folder)  # type: ignore[no-any-return]


def _part_taken(folder: Path) -> nn.Module:
    """Take the trunk of a model, frozen, under a head of one's own."""
    trunk = _read("llama", "AutoModel")(folder).requires_grad_(False)
    torch.manual_seed(1)
    return nn.ModuleDict({"trunk": trunk, "head": nn.Linear(32, 2)})


CERTAIN = {
    "from_pretrained": _read("llama", dtype=torch.float32),
    "from_pretrained in bf16": _read("llama", dtype=torch.bfloat16),
    "from_pretrained of several files": _read("sharded"),
    "from_pretrained of several files in fp32": _read("sharded", dtype=torch.float32),
    "from_pretrained of tied weights": _read("gpt2"),
    "from_pretrained of experts": _read("mixtral"),
    "from_pretrained of a .bin": _from_bin,
    "a trunk of from_pretrained": _part_taken,
}
DRAWN = {
    "from_pretrained with a new head": _read(
        "bert", "AutoModelForSequenceClassification", num_labels=3
    ),
    "from_pretrained with more tokens": _resized,
}
