"""Finds tensors of a model that lie in the memory of one of its parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autopar.runtime.model.held_tensors import replace_held
from autopar.runtime.tensor.contents import has_own_ops


def sharing(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names of parameters, each with what shares memory with it and is another object.

    Training moves both in plain PyTorch. Here each part of a model has memory of its own.
    """
    parameters = {name: one for name, one in model.named_parameters() if _lies_in_memory(one)}
    others = list(parameters.items()) + list(model.named_buffers())

    def note(name: str, tensor: Tensor) -> Tensor:
        others.append((name, tensor))
        return tensor

    replace_held(model, note)
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, one in others:
        if _lies_in_memory(one):
            by_storage.setdefault(one.untyped_storage()._cdata, []).append((name, one))
    for found in by_storage.values():
        for name, one in found:
            if one is parameters.get(name):
                yield from ((name, other) for other, two in found if _meet(one, two))


def _lies_in_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not has_own_ops(tensor)


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of a storage have an element in common."""
    if one is other or not one.numel() or not other.numel():
        return False
    size = one.untyped_storage().nbytes()
    if one.dtype is not other.dtype:
        return True
    marked = torch.zeros(size // one.element_size(), dtype=torch.bool)
    marked.as_strided(one.shape, one.stride(), int(one.storage_offset())).fill_(True)
    return bool(marked.as_strided(other.shape, other.stride(), int(other.storage_offset())).any())
