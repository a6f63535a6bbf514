"""A language model of transformers with adapters of peft, and a head that is trained as a whole."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.field.families import family_named


def build_base() -> nn.Module:
    """Return the model that the adapters are for, with one layer."""
    model = family_named("Llama").build_model()
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    del layers[1:]
    return model


def build_model() -> nn.Module:
    """Return the model with its adapters."""
    adapted = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])
    model: nn.Module = get_peft_model(build_base(), adapted)
    return model


def example_batch(batch_size: int) -> dict[str, Tensor]:
    """Return random tokens."""
    return family_named("Llama").example_batch(batch_size)
