"""Turns a constructor into a model on the meta device, and the record of how it was built."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from autopar.runtime.ranks.randomness import seeded
from autopar.runtime.tensor.shards import Place, group_aliases, hang
from autopar.runtime.weights.recording.pretended_cpu import recorded
from autopar.runtime.weights.recording.recording import META, Recording


def recorded_model(factory: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Recording]:
    """Build a model whose tensors have no memory, but for those that come from elsewhere."""
    recording = Recording(seed)
    with seeded(seed), recorded(recording):
        model = factory()
    if recording.failure is not None:  # a constructor that goes on has done something else
        raise recording.failure
    return model, recording


def move_to_meta(found: Collection[Place], on_meta: Callable[[Tensor], Tensor]) -> None:
    """Let go of the numbers of real tensors."""
    for group in group_aliases(found):
        if group[0].tensor.device != META:
            hang(group, on_meta(group[0].tensor.detach()))
