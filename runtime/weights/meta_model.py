"""Turns a constructor into its model on the meta device, with nothing of what its tensors hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.runtime.model.held_tensors import replace_held
from autopar.runtime.tensor.contents import made_like
from autopar.runtime.tensor.shards import places
from autopar.runtime.weights.recording.left_over import make_real, new_objects_apart
from autopar.runtime.weights.recording.recorded_model import move_to_meta, recorded_model
from autopar.runtime.weights.recording.recording import META


def meta_model(
    factory: Callable[[], nn.Module], check: Callable[[nn.Module], None], *, seed: int = 0
) -> nn.Module:
    """Build a model that takes no memory, and is otherwise as plain PyTorch builds it.

    What the constructor reads is right: files, numbers of its tensors, the devices of these. What
    it leaves elsewhere, as in caches, has its numbers. The model is checked while its tensors are
    still those of the constructor.
    """
    with new_objects_apart():
        model, recording = recorded_model(factory, seed)
        if isinstance(model, nn.Module):
            check(model)
            strip(model)
        kept = {id(place.tensor) for place in places(model)} if isinstance(model, nn.Module) else ()
        make_real(recording, kept)
    return model


def strip(model: nn.Module) -> None:
    """Move all tensors of a model to the meta device: registered ones, and others that it holds."""
    move_to_meta(list(places(model)), lambda tensor: torch.empty_like(tensor, device=META))
    replace_held(model, _without_memory)


def _without_memory(_: str, tensor: Tensor) -> Tensor:
    fresh = torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
    return made_like(fresh, tensor)
