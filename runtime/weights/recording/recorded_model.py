"""Runs a constructor while its ops are recorded, and builds models without memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from autopar.runtime.model.plain_tensors import replace_plain_tensors
from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.tensor.shards import (
    TensorPlace,
    group_aliases,
    hang,
    made_like,
    places,
    put_into,
)
from autopar.runtime.weights.recording.pretended_cpu import recorded
from autopar.runtime.weights.recording.recording import META, ConstructorRecording


@contextmanager
def new_objects_apart() -> Iterator[None]:
    """Freeze existing objects, so that the garbage collector only lists new ones.

    A process has hundreds of thousands of old objects; visiting all of them takes half a second.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def make_real(recording: ConstructorRecording, except_for: Collection[int]) -> None:
    """Give values to all recorded tensors, except those with these ids.

    The tensors may be plain attributes, or in lists, closures, caches or other objects. Each stays
    the same object, and shared memory stays shared.
    """
    gc.collect()  # unreachable tensors need no values
    found = (one for one in gc.get_objects() if issubclass(type(one), Tensor))
    held = {id(one): one for one in (*found, *recording.adopted)}
    left = [
        one for key, one in held.items() if key not in except_for and recording.is_recorded(one)
    ]
    values = [recording.value(one) for one in left]
    with torch.no_grad():
        for one, made in zip(left, recording.history.replay(values), strict=True):
            put_into(one, made)


def recorded_model(
    factory: Callable[[], nn.Module], seed: int
) -> tuple[nn.Module, ConstructorRecording]:
    """Build a model whose recorded tensors have no memory; tensors from elsewhere keep theirs."""
    recording = ConstructorRecording(seed)
    with seeded(seed), recorded(recording):
        model = factory()
    if recording.failure is not None:  # the constructor caught the error and took another path
        raise recording.failure
    return model, recording


def move_to_meta(found: Collection[TensorPlace], on_meta: Callable[[Tensor], Tensor]) -> None:
    """Replace real tensors by meta tensors."""
    for group in group_aliases(found):
        if group[0].tensor.device != META:
            hang(group, on_meta(group[0].tensor.detach()))


def meta_model(
    factory: Callable[[], nn.Module], check: Callable[[nn.Module], None], *, seed: int = 0
) -> nn.Module:
    """Build a model without memory that otherwise equals the model of plain PyTorch.

    The constructor finds the same files, values and devices. Tensors that it leaves elsewhere, as
    in caches, get values. `check` is called before the tensors are replaced by meta tensors.
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
    """Move all tensors of a model to the meta device, registered or not."""
    move_to_meta(list(places(model)), lambda tensor: torch.empty_like(tensor, device=META))
    replace_plain_tensors(model, _without_memory)


def _without_memory(_: str, tensor: Tensor) -> Tensor:
    fresh = torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
    return made_like(fresh, tensor)
